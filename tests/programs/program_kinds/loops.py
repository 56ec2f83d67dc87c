"""Loops around one small model: what happens in which order between two steps."""

import contextlib

import torch
import torch.nn.functional as F
from program_catalogue import Trained, registry, seeded
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

PROGRAMS, program = registry()
NUM_STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Residual blocks between two linear layers, with two heads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Block(64, dropout) for _ in range(4))
        self.head, self.other = nn.Linear(64, 10), nn.Linear(64, 64)

    def features(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x, task="classes"):
        x = self.features(x)
        return self.head(x) if task == "classes" else self.other(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(step)
    return torch.randn(32, 16, generator=generator), torch.randint(10, (32,), generator=generator)


def made(ullage, dropout: float = 0.0, **options):
    model = Net(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    return ullage.prepare(model, optimizer, (batch(0)[0],), **options)


@program
def r_drop(ullage) -> Trained:
    """R-Drop: two forwards with other dropout before one backward."""
    model, optimizer = made(ullage, dropout=0.1)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        p, q = model(x), model(x)
        loss = F.cross_entropy(p, y) + F.cross_entropy(q, y)
        loss = loss + F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def contrastive(ullage) -> Trained:
    """SimCLR: two views through one encoder."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, _ = batch(step)
        a, b = (F.normalize(model(x + 0.1 * k, task="features"), dim=-1) for k in (0, 1))
        loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def simsiam(ullage) -> Trained:
    """SimSiam: one of two views without gradients."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, _ = batch(step)
        with torch.no_grad():
            target = model(x + 0.1, task="features")
        loss = -F.cosine_similarity(model(x, task="features"), target).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def mean_teacher(ullage) -> Trained:
    """Mean teacher: an exponential average of the weights gives the targets."""
    teacher = Net()
    torch.manual_seed(1)
    model, optimizer = made(ullage)
    teacher.load_state_dict(model.state_dict())
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        with torch.no_grad():
            target = teacher(x)
        out = model(x)
        loss = F.cross_entropy(out, y) + F.mse_loss(out, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                teacher.get_parameter(name).lerp_(weight, 0.1)
        losses.append(loss.item())
    return losses, teacher


@program
def averaged_weights(ullage) -> Trained:
    """EMA of weights, by torch.optim.swa_utils."""
    model, optimizer = made(ullage)
    averaged = AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.9), device="cpu")
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        losses.append(loss.item())
    return losses, averaged.module


@program
def accumulation(ullage) -> Trained:
    """Gradient accumulation over four micro-batches."""
    model, optimizer = made(ullage, num_micro_batches=4)
    losses = []
    for step in range(NUM_STEPS):
        for k in range(4):
            x, y = batch(4 * step + k)
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@program
def accumulation_that_was_not_planned(ullage) -> Trained:
    """Other numbers of micro-batches than planned, and other ones in each step."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        for k in range(1 + step):
            x, y = batch(4 * step + k)
            loss = F.cross_entropy(model(x), y) / (1 + step)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@program
def losses_of_one_forward(ullage) -> Trained:
    """Several backward passes of one forward (retain_graph)."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        out = model(x)
        first, second = F.cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [first.item(), second.item()]
    return losses, model


@program
def gradient_penalty(ullage) -> Trained:
    """WGAN-GP: a penalty on the gradient with respect to the input."""

    def penalised(model, x):
        x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (gradient.norm(dim=-1) - 1).square().mean()

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, batch(0)[0], step=penalised)
    losses = []
    for step in range(NUM_STEPS):
        loss = penalised(model, batch(step)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def adversarial_examples(ullage) -> Trained:
    """FGSM: backward to the input, and a second forward and backward on what it gives."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        worse = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(worse), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def free_adversarial(ullage) -> Trained:
    """PGD: three passes to the input by autograd.grad, then the step's own."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        delta = torch.zeros_like(x)
        for _ in range(3):
            delta.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
            delta = (delta + 0.02 * gradient.sign()).detach()
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def batches_without_backward(ullage) -> Trained:
    """A batch whose loss is too large is left out before backward."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        if step % 2:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@program
def steps_left_out(ullage) -> Trained:
    """A step is left out where the norm of gradients is not finite, as loss scaling does."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) * (float("inf") if step == 1 else 1.0)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        losses.append(norm.item() if step != 1 else 0.0)
    return losses, model


@program
def evaluation_between_steps(ullage) -> Trained:
    """An evaluation after every step."""
    model, optimizer = made(ullage, dropout=0.1)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            losses.append(F.cross_entropy(model(x[:7]), y[:7]).item())
        model.train()
    return losses, model


@program
def heads_in_turn(ullage) -> Trained:
    """Two tasks in turn, each with a head of its own."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) if step % 2 else model(x, task="features").square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def methods_other_than_forward(ullage) -> Trained:
    """The loop calls a method of the model, and not the model."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model.head(model.features(x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def stochastic_depth(ullage) -> Trained:
    """Blocks are left out at random."""
    model, optimizer = made(ullage)
    for index, block in enumerate(model.blocks):
        own = block.forward
        block.forward = lambda x, own=own, index=index: x if int(torch.randint(3, ())) == index % 3 else own(x)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def deep_supervision(ullage) -> Trained:
    """Losses at layers inside the model, taken by forward hooks."""
    model, optimizer = made(ullage)
    seen: list[torch.Tensor] = []
    for block in model.blocks[:2]:
        block.register_forward_hook(lambda _module, _args, output: seen.append(output))
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss = loss + sum(value.square().mean() for value in seen)
        seen.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def learning_rates_in_groups(ullage) -> Trained:
    """Groups with their own rates, and a schedule."""
    model = Net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2, eps=1e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=NUM_STEPS + 1)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def gradual_unfreezing(ullage) -> Trained:
    """Blocks are frozen at first, by setting requires_grad before and after."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index >= 3 - step)
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def exceptions_in_a_batch(ullage) -> Trained:
    """A batch raises an exception, is caught and left out."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        with contextlib.suppress(ValueError):
            out = model(x)
            if step == 1:
                raise ValueError
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
    return losses, model


@program
def closures(ullage) -> Trained:
    """step(closure), as optimizers with line search want it."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses, model


@program
def gradients_read_and_changed(ullage) -> Trained:
    """Noise is added to gradients, and their norm is logged, between backward and step."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@program
def reinforce(ullage) -> Trained:
    """REINFORCE: the model returns a distribution; actions are drawn without gradients, then learned."""

    class Actor(Net):
        def forward(self, x):
            return torch.distributions.Categorical(logits=super().forward(x))

    model = Actor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    losses = []
    baseline = 0.0
    for step in range(NUM_STEPS):
        x, y = batch(step)
        with torch.no_grad():
            actions = model(x).sample()
        reward = (actions == y).float()
        chosen = model(x).log_prob(actions)
        loss = -((reward - baseline) * chosen).mean()
        baseline = 0.9 * baseline + 0.1 * float(reward.mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def epochs_of_ppo(ullage) -> Trained:
    """PPO: one rollout, several steps on its parts with clipped ratios."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS // 2):
        x, y = batch(step)
        model.eval()
        with torch.no_grad():
            old = model(x).log_softmax(-1).gather(1, y[:, None])
        model.train()
        for half in (slice(16), slice(16, 32)):
            ratio = (model(x[half]).log_softmax(-1).gather(1, y[half, None]) - old[half]).exp()
            loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


@program
def knowledge_distillation(ullage) -> Trained:
    """A frozen teacher in memory, a student under the plan."""
    teacher = Net().eval().requires_grad_(False)
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, _ = batch(step)
        loss = F.kl_div(model(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def truncated_backpropagation(ullage) -> Trained:
    """The output is the next input, detached every second time."""
    model, optimizer = made(ullage)
    losses = []
    state = torch.zeros(32, 16)
    for step in range(NUM_STEPS):
        x, y = batch(step)
        out = model(x + state)
        again = model(F.pad(out, (0, 6)))
        loss = F.cross_entropy(out, y) + F.cross_entropy(again, y)
        state = F.pad(again, (0, 6)).detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def cached_gradients(ullage) -> Trained:
    """GradCache: outputs without gradients first, then the model again, with dropout, inside of backward."""
    model, optimizer = made(ullage, dropout=0.1)
    losses = []
    for step in range(NUM_STEPS):
        x, _ = batch(step)
        with torch.no_grad():
            cached = model(x).requires_grad_()

        def again(gradient, x=x):
            with torch.enable_grad():
                model(x).backward(gradient)

        cached.register_hook(again)
        loss = cached.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def weights_in_the_loss(ullage) -> Trained:
    """Norms of weights are logged between steps."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(p.detach().norm() for p in model.parameters())))
    return losses, model


@program
def other_batch_sizes(ullage) -> Trained:
    """The last batch of an epoch is smaller."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = (tensor[: 32 - 5 * step] for tensor in batch(step))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@program
def folds(ullage) -> Trained:
    """Cross-validation: a model for each fold, which is evaluated again after the others have trained."""
    losses, weights, models = [], {}, []
    for fold in range(3):
        torch.manual_seed(fold)
        model, optimizer = made(ullage, dropout=0.1)
        for step in range(2):
            x, y = batch(10 * fold + step)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses += [F.cross_entropy(model(batch(90 + i)[0]), batch(90 + i)[1]).item() for i in range(3)]
        if hasattr(optimizer, "session"):
            optimizer.session.close()
        models.append(model)
    for fold, model in enumerate(models):
        losses.append(model(batch(0)[0]).sum().item())
        weights |= {f"{fold}.{name}": weight for name, weight in model.state_dict().items()}
    return losses, weights


@program
def critic_with_a_penalty(ullage) -> Trained:
    """WGAN-GP without clipping: the generator's backward adds to used gradients, which the critic's turn drops."""
    critic = Net()
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 16))
    ours = torch.optim.Adam(critic.parameters(), lr=1e-2, eps=1e-4)
    theirs = torch.optim.Adam(generator.parameters(), lr=1e-2, eps=1e-4)
    critic, ours = ullage.prepare(critic, ours, (batch(0)[0],), clip=False)
    losses = []
    for step in range(NUM_STEPS):
        ours.zero_grad()
        real, noise = batch(step)[0], torch.randn(32, 4, generator=seeded(step))
        fake = generator(noise).detach()
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).mean(1).sum(), mixed, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        ours.step()
        theirs.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        theirs.step()
        losses.append(loss.item())
    weights = {"critic": critic, "generator": generator}
    return losses, {
        f"{name}.{key}": value for name, model in weights.items() for key, value in model.state_dict().items()
    }


@program
def weights_written_by_state_dict(ullage) -> Trained:
    """Federated averaging: a loop copies into the tensors of state_dict()."""
    model, optimizer = made(ullage)
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for values in model.state_dict().values():
            values.copy_(0.9 * values)
        losses.append(loss.item())
    return losses, model


@program
def layer_over_the_same_memory(ullage) -> Trained:
    """A layer outside of the model has the data of one of its weights, since before prepare."""
    model = Net()
    outside = nn.Linear(64, 10)
    outside.weight.data = model.head.weight.data
    initial = model.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = ullage.prepare(model, optimizer, (batch(0)[0],))
    losses = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), float(outside(torch.ones(64)).norm()), float(initial["embed.weight"].norm())]
    return losses, model
