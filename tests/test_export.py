"""A head that is written and read again drafts the same; what a layout cannot say is refused."""

import json

import pytest
import torch
from conftest import prompts, run, tiny
from safetensors.torch import load_file, save_file
from test_neural import stirred

from drafters import dflash, dspark, eagle, eagle1, medusa, mtp
from drafters.export import export
from drafters.export import run as run_export
from specbench import cli
from specbench.drafting import Request
from specbench.errors import ConfigError

HEADS = {
    "eagle": lambda **o: eagle.Eagle(
        **(o or {"network": eagle.Options(vocabulary=120, taps=[3, 1, 2], tap_norms=True, norm_before_residual=True)})
    ),
    "eagle_whole": lambda **o: eagle.Eagle(
        **(
            o
            or {"network": eagle.Options(taps=[3, 0], head_norms=True, norm_output=True, norm_before_fc=True, layers=2)}
        )
    ),
    "eagle1": lambda **o: eagle1.Eagle1(**(o or {"network": eagle1.Options(layers=2, bias=False)})),
    "mtp": lambda **o: mtp.Mtp(**(o or {"network": mtp.Options(vocabulary=120, hidden_first=True)})),
    "medusa": lambda **o: medusa.Medusa(**(o or {"network": medusa.Options(layers=2, vocabulary=120)})),
    "dflash": lambda **o: dflash.DFlash(**(o or {"network": dflash.Options(taps=[3, 1], block=5)})),
    "dspark": lambda **o: dspark.DSpark(**(o or {"network": dspark.Options(block=4, kind="rnn", vocabulary=120)})),
    "dspark_plain": lambda **o: dspark.DSpark(
        **(o or {"network": dspark.Options(block=5, rank=0, anchor_first=False, confidence=False)})
    ),
}


def drafts(drafter, target):
    requests = [Request(f"p{i}", p) for i, p in enumerate(prompts(target))]
    _, steps = run(target, drafter, requests, k=3)
    return [step.drafted for step in steps]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("head", HEADS)
def test_what_was_written_drafts_the_same(head, kind, tmp_path):
    target = tiny(kind)
    written = stirred(HEADS[head](), target)
    export(written, target, tmp_path / "head")
    assert drafts(HEADS[head](checkpoint=str(tmp_path / "head")), target) == drafts(written, target)


def test_modules_written_as_mimo_draft_the_same(tmp_path):
    target = tiny("llama")
    written = stirred(mtp.Mtp(), target)
    export(written, target, tmp_path / "head", layout="mimo")
    assert drafts(mtp.Mtp(checkpoint=str(tmp_path / "head")), target) == drafts(written, target)


def test_taps_are_written_in_rising_order(tmp_path):
    export(HEADS["eagle"](), tiny("llama"), tmp_path / "head")
    config = json.loads((tmp_path / "head/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["num_aux_hidden_states"] == 3


def test_the_ends_are_the_targets(tmp_path):
    target = tiny("llama")
    export(eagle.Eagle(), target, tmp_path / "head", ends=True)
    tensors = load_file(tmp_path / "head/model.safetensors")
    model = target.model
    assert torch.equal(tensors["embed_tokens.weight"], model.get_input_embeddings().weight)
    assert torch.equal(tensors["lm_head.weight"], model.get_output_embeddings().weight)


@pytest.mark.parametrize(
    ("drafter", "layout", "said"),
    [
        (lambda: mtp.Mtp(network=mtp.Options(modules=2)), None, "modules > 1"),
        (lambda: mtp.Mtp(network=mtp.Options(norm_output=False)), None, "norm_output=false"),
        (lambda: mtp.Mtp(network=mtp.Options(vocabulary=99)), "mimo", "output_head"),
        (lambda: eagle.Eagle(), "mimo", "layout=mimo is one of MTP modules"),
    ],
)
def test_what_a_layout_cannot_say_is_refused_and_nothing_is_left(drafter, layout, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        export(drafter(), tiny("llama"), tmp_path / "head", layout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("drafter", "kind", "said"),
    [
        (lambda: eagle1.Eagle1(), "llama", "have no place for them"),
        (lambda: eagle.Eagle(), "gemma3", "scales its embeddings"),
    ],
)
def test_ends_are_refused_where_they_would_be_misread(drafter, kind, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        export(drafter(), tiny(kind), tmp_path / "head", ends=True)


def test_a_checkpoint_that_lacks_its_last_layer_is_refused(tmp_path):
    target = tiny("llama")
    export(dflash.DFlash(network=dflash.Options(layers=3)), target, tmp_path / "head")
    file = tmp_path / "head/model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if not name.startswith("layers.2.")}, file)
    with pytest.raises(ConfigError, match="says num_hidden_layers=3 and holds 2"):
        dflash.DFlash(checkpoint=str(tmp_path / "head")).bind(target)


def test_rope_parameters_by_kind_of_layer_are_those_of_full_attention(tmp_path):
    target = tiny("llama")
    export(eagle.Eagle(), target, tmp_path / "head")
    file = tmp_path / "head/config.json"
    config = json.loads(file.read_text())
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config["transformer_layer_config"]["rope_parameters"] = kinds
    file.write_text(json.dumps(config))
    drafter = eagle.Eagle(checkpoint=str(tmp_path / "head"))
    drafter.bind(target)
    assert drafter.spec.shape.rope["rope_theta"] == 1e6


@pytest.mark.parametrize("damage", [{"num_attention_heads": 0}, {"rms_norm_eps": "small"}, {"hidden_act": "odd"}])
def test_a_damaged_configuration_is_one_line(damage, tmp_path):
    target = tiny("llama")
    export(eagle.Eagle(), target, tmp_path / "head")
    file = tmp_path / "head/config.json"
    config = json.loads(file.read_text())
    config["transformer_layer_config"].update(damage)
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"drafter\.checkpoint="):
        eagle.Eagle(checkpoint=str(tmp_path / "head")).bind(target)


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export(eagle.Eagle(), tiny("llama"), tmp_path / "head")
    assert [file.name for file in (tmp_path / "head").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["drafter=eagle", "drafter.checkpoint=null"], 0, "config.json, model.safetensors"),
        (["drafter=eagle"], 2, "no eagle comes with specbench for tiny-llama"),
        (["drafter=ngram"], 2, "NGram has no network to write"),
        (["drafter=mtp", "layout=odd"], 2, "layout=odd is unknown"),
        (["drafter=eagle", "drafter.checkpoint=./nothing"], 2, "there is no such folder"),
    ],
)
def test_command(arguments, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["export"])
    given = ["target=tiny", "dtype=float32", "out=head", *arguments]
    assert cli.run_command("export", run_export, arguments=given) == code
    captured = capsys.readouterr()
    assert said in " ".join((captured.out + captured.err).split())
    assert (tmp_path / "head").exists() == (code == 0)
