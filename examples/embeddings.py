"""Text embeddings with `sentence-transformers`: pairs that belong together, in a loop of your own."""

from pydoc_data.topics import topics

import torch
from sentence_transformers import SentenceTransformer, models, util
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

import ullage

torch.manual_seed(0)
pages = [" ".join(page.split()) for page in topics.values()]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(pages, vocab_size=400, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("base")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
AutoModel.from_config(BertConfig(vocab_size=400, **sizes)).save_pretrained("base")

transformer = models.Transformer("base", max_seq_length=32)  # your folder
model = SentenceTransformer(modules=[transformer, models.Pooling(64)], device="cpu").train()
pairs = [(page[:80], page[80:160]) for page in pages if len(page) > 160][:16]  # beginnings, and how they go on
texts = [text for pair in pairs for text in pair]
features = model.tokenize(texts)


def embedded(tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the vectors of texts, of length 1: the network that is prepared, and the mean over tokens."""
    found = {"token_embeddings": network(**tokens).last_hidden_state, "attention_mask": tokens["attention_mask"]}
    return torch.nn.functional.normalize(model[1](found)["sentence_embedding"], dim=1)


network = transformer.auto_model
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
tokens = {name: features[name] for name in ("input_ids", "attention_mask")}
network, optimizer = ullage.prepare(network, optimizer, tokens, device_memory="8MB")  # leave out: all that is free
print(optimizer.plan)
for _ in range(15):
    vectors = embedded(tokens)  # both texts of all pairs in one forward, as planned
    scores = vectors[::2] @ vectors[1::2].T * 20
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(pairs)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")

optimizer.session.close()  # the model is an ordinary one again
model.eval().save("tuned")
ours = model.encode(texts, convert_to_tensor=True)
print("similar:", util.pairwise_cos_sim(ours[::2], ours[1::2]).mean().item())
saved = SentenceTransformer("tuned", device="cpu").encode(texts, convert_to_tensor=True)
print("same classes:", torch.allclose(ours, saved))
