"""Swapped models of sentence-transformers: embeddings, gradients, saved models, its Trainer."""

import copy

import pytest
import torch

import onepass
from onepass import numerics
from onepass._dispatch_log import record

transformers = pytest.importorskip("transformers")
pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed", exc_type=ImportError
)
from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

WORDS = "the a cat dog sat ran on under mat tree and red blue big small".split()
SENTENCES = ["the cat sat on the mat", "a big dog ran", "red tree", "a small cat and the dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of two layers and its tokenizer, as they are on the Hub."""
    place = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate(special + WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(place)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(place)
    return str(place)


def embedder(folder):
    parts = [modules.Transformer(folder), modules.Pooling(32), modules.Normalize()]
    return SentenceTransformer(modules=parts, device="cpu")


def swapped(model):
    report = onepass.swap(model)
    kinds = {entry["kind"] for entry in report.swapped}
    assert {"norm", "dropout", "attention"} <= kinds
    return model


def test_embeddings(folder):
    stock = embedder(folder)
    base = stock.encode(SENTENCES, convert_to_tensor=True)
    ref = copy.deepcopy(stock).double().encode(SENTENCES, convert_to_tensor=True)
    model = swapped(embedder(folder))
    with record() as calls:
        found = model.encode(SENTENCES, convert_to_tensor=True)
    ours = [call["op"] for call in calls if "torch" not in call["level"]]
    assert ours.count("layer_norm") == 5
    numerics.assert_close(found, ref, base)
    onepass.unswap(model)
    assert torch.equal(model.encode(SENTENCES, convert_to_tensor=True), base)


def gradients(model):
    """Of pairs of sentences that belong together."""
    model.train()
    features = [model.preprocess(SENTENCES[::2]), model.preprocess(SENTENCES[1::2])]
    loss = losses.MultipleNegativesRankingLoss(model)(features, None)
    wanted = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [loss.detach(), *(g for g in found if g is not None)]


def test_gradients(folder):
    base, ref = gradients(embedder(folder)), gradients(embedder(folder).double())
    # Together: a gradient of 32 numbers says little about an error.
    numerics.assert_close(gradients(swapped(embedder(folder))), ref, base)


def test_saved_models(folder, tmp_path):
    model = swapped(embedder(folder))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    expected = model.encode(SENTENCES, convert_to_tensor=True)
    model.save(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert not any("onepass" in type(m).__module__ for m in loaded.modules())
    torch.testing.assert_close(loaded.encode(SENTENCES, convert_to_tensor=True), expected)


def test_its_trainer(folder, tmp_path):
    datasets = pytest.importorskip("datasets", reason="its Trainer takes the package datasets")
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    from onepass.integrations.transformers import SwapCallback, trainer_optimizer

    data = datasets.Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[::-1]})

    def trained(seed, ours=False, double=False):
        model = embedder(folder)
        if double:
            model.double()
        args = Arguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2,
            learning_rate=1e-3, report_to=[], use_cpu=True, save_strategy="no", seed=seed,
            disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant",
        )  # fmt: skip
        more = {}
        if ours:
            more["optimizer_cls_and_kwargs"] = trainer_optimizer(args)
            more["callbacks"] = [SwapCallback()]
        loss = losses.MultipleNegativesRankingLoss(model)
        trainer = SentenceTransformerTrainer(model, args, data, loss=loss, **more)
        trainer.train()
        if ours:
            assert type(trainer.optimizer.optimizer) is onepass.optim.AdamW
            assert not any("onepass" in type(m).__module__ for m in model.modules())
        found = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        assert len(found) == 4
        return torch.tensor(found, dtype=torch.float64 if double else torch.float32)

    # Sums of few sentences: several runs, so that the largest error is no luck.
    ours, ref, base = (
        [trained(seed, **how) for seed in range(8)]
        for how in (dict(ours=True), dict(double=True), {})
    )
    assert min(float((curve[0] - curve[-1]).abs()) for curve in ref) > 1e-3
    numerics.assert_close(ours, ref, base)
