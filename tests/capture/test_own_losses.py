"""Models that return no loss: the plan has memory for the one that the loop makes of what they return."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ullage
from planner.schedule.tasks import Tier

NUM_TOKENS, VOCAB = 256, 5000


class Scores(nn.Module):
    """A model of tokens that returns their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        scores: torch.Tensor = self.head(hidden)
        return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_a_loss_outside_of_the_model_is_planned(dtype: torch.dtype) -> None:
    tokens = torch.randint(VOCAB, (2, NUM_TOKENS // 2))
    model = Scores().to(dtype)
    model, optimizer = ullage.prepare(model, torch.optim.AdamW(model.parameters()), (tokens,), hardware="epyc-turin-2c")
    with optimizer.session as session:
        for _ in range(2):
            with session.metered():
                scores = model(tokens)
                functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten()).backward()
                del scores
                optimizer.step()
                optimizer.zero_grad()
            session.synchronize()
            memory = session.memory()[Tier.GPU]
        planned = optimizer.plan.prediction.memory[Tier.GPU].peak_bytes - sum(memory.static_bytes.values())
        assert planned == pytest.approx(memory.dynamic_peak_bytes, rel=0.05)
