"""Real weights that lie in Python packages."""

import re
import zipfile

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from real_weights import folder

from odeformer.data import fetch
from odeformer.pretrained import WHEELS, from_huggingface, parity_report, to_huggingface, wheel, wrap


@pytest.fixture(autouse=True)
def _quiet():
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()


def both(name, kind, dtype=torch.float64):
    at = folder(name)
    theirs = getattr(hf, kind).from_pretrained(at, local_files_only=True).to(dtype).eval()
    return from_huggingface(at).to(dtype), theirs


REACTION = "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"  # of rxnmapper's own documentation


def vocabulary(at):
    """Its words, by their ids."""
    return (at / "vocab.txt").read_text(encoding="utf-8").split("\n")


def reaction(at):
    """The tokens of REACTION by the package's vocabulary: atoms, bonds, brackets."""
    words = vocabulary(at)
    pattern = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"
    found = re.findall(pattern, REACTION)
    assert "".join(found) == REACTION
    return torch.tensor([[words.index(x) for x in ("[CLS]", *found, "[SEP]")]])


def test_rxnmapper_gives_the_logits_of_the_original():
    ours, theirs = both("rxnmapper", "AlbertForMaskedLM")
    tokens = reaction(folder("rxnmapper"))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    assert ours.config.depth.weights == "shared" and ours.config.n_layers == 12 and len(ours.layers) == 1
    assert ours.config.origin["left_out"] == ["albert.pooler.bias", "albert.pooler.weight"]
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits
        assert (ours(tokens, mask) - wanted).abs().max() < 1e-11
        assert (ours.float()(tokens) - wanted).abs().max() < 1e-5 * wanted.abs().max()  # of float32, like theirs
        hidden = tokens.clone()
        hidden[0, 7] = vocabulary(folder("rxnmapper")).index("[MASK]")
        assert ours(hidden)[0, 7].argmax() == tokens[0, 7]  # the model knows what it hides
    report = parity_report(ours.double(), theirs, tokens)
    assert report.first_differing is None and len(report.rows) == 14
    for key, x in to_huggingface(ours.float()).state_dict().items():
        assert torch.equal(x, theirs.float().state_dict()[key]), key


def test_rxnmapper_is_an_autonomous_field_that_other_solvers_integrate():
    ours, theirs = both("rxnmapper", "AlbertForMaskedLM")
    tokens = reaction(folder("rxnmapper"))
    with torch.no_grad():
        wanted, solution = ours(tokens, return_solution=True)
        z = solution.states[0]
        assert torch.equal(solution.field(z, torch.tensor(0.0)), solution.field(z, torch.tensor(11.5)))
        same = ours.with_solver("euler", n_steps=12)(tokens)
        assert torch.equal(same, wanted)
        wrapped = wrap(theirs)
        assert (wrapped(input_ids=tokens).logits - wanted).abs().max() < 1e-11
        fine = wrapped.with_solver("rk4", n_steps=24)(input_ids=tokens).logits
        composed = from_huggingface(folder("rxnmapper"), solver="rk4", n_steps=24, coupling="composed").double()
        assert (composed(tokens) - fine).abs().max() < 1e-10  # the field of a layer as a whole, ours and theirs


@pytest.mark.slow
def test_minilm_gives_the_states_of_the_original():
    ours, theirs = both("minilm", "BertModel")
    tokens = torch.randint(1000, 30000, (2, 24))
    mask = torch.arange(24) < torch.tensor([[24], [15]])
    assert ours.config.n_layers == 6 and ours.config.block.d_model == 384
    with torch.no_grad():
        output = theirs(input_ids=tokens, attention_mask=mask.long())
        states = ours(tokens, mask)
        assert (states - output.last_hidden_state)[mask].abs().max() < 1e-11
        assert (ours.pooled(states) - output.pooler_output).abs().max() < 1e-11
        single = ours.float()(tokens, mask)
        assert (single - output.last_hidden_state)[mask].abs().max() < 1e-5
    for key, x in to_huggingface(ours).state_dict().items():
        assert torch.equal(x, theirs.float().state_dict()[key]), key


def test_what_cannot_be_fetched_or_is_damaged_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("ODEFORMER_DATA", str(tmp_path))
    for name in ("rxn", "bert"):
        with pytest.raises(ValueError, match="rxnmapper"):
            wheel(name)
    with pytest.raises(TypeError, match="rxnmapper"):
        wheel(3)
    (tmp_path / "wheels").mkdir()
    chosen = WHEELS["rxnmapper"]
    path = tmp_path / "wheels" / f"{chosen.package}-{chosen.version}-py3-none-any.whl"
    path.write_bytes(b"no wheel")
    with pytest.raises(ValueError, match="SHA-256"):
        wheel("rxnmapper")
    path.unlink()
    monkeypatch.setattr(fetch, "run", unreachable)
    with pytest.raises(ConnectionError, match="no network"):
        wheel("rxnmapper")
    assert not (tmp_path / "pretrained").exists()


def unreachable(*command, folder):
    raise ConnectionError("no network")


def test_a_wheel_is_unpacked_once_and_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("ODEFORMER_DATA", str(tmp_path))
    source = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as file:
        for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
            file.writestr(f"some/model/{name}", name)
    fetched = []
    monkeypatch.setattr("odeformer.pretrained.wheels.fetch", lambda *a, **k: fetched.append(a) or source)
    chosen = type(WHEELS["rxnmapper"])("some", "1.0", "", "some/model")
    monkeypatch.setitem(WHEELS, "some", chosen)
    at = wheel("some")
    assert sorted(x.name for x in at.iterdir()) == ["config.json", "model.safetensors"]
    assert (at / "config.json").read_text() == "config.json" and wheel("some") == at and len(fetched) == 1
    assert [x.name for x in at.parent.iterdir()] == [at.name]
