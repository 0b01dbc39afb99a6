"""The store over real files: names, contents, order of eviction, leases, and writers that are killed."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from app import store as store_module
from app.errors import FovealError
from app.formats.dtypes import NUMPY
from app.formats.types import EncodedItem
from app.media.types import MediaOptions
from app.store import FILE, TENSOR, Store, item_hash
from tests.unit.conftest import Recorded

NOTHING = 1 << 40
FORK = multiprocessing.get_context("fork")
OPTIONS = st.builds(
    MediaOptions,
    st.sampled_from(["auto", "image", "video"]),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(1, 3),
    st.none() | st.sampled_from([1.0, 2.0]),
    st.none() | st.integers(1, 3),
)
NAMED = st.tuples(
    st.lists(st.binary(max_size=3), max_size=3),
    OPTIONS,
    st.fixed_dictionaries(
        {
            "frames": st.booleans(),
            "checkpoint": st.sampled_from(["a", "b"]),
            "compute_dtype": st.sampled_from(["float32", "bfloat16"]),
            "dtype": st.sampled_from(["float32", "bfloat16"]),
            "pooling": st.sampled_from(["none", "mean"]),
        }
    ),
)
BASE: dict[str, Any] = {
    "frames": False,
    "checkpoint": "c",
    "compute_dtype": "float32",
    "dtype": "float32",
    "pooling": "none",
}


@pytest.fixture(autouse=True)
def metrics(recorded: Recorded) -> Recorded:
    return recorded


def named(n: int) -> str:
    return f"{n:064x}"


def item(rows: int = 4, dtype: str = "float32", value: int = 1, video: bool = False) -> EncodedItem:
    return EncodedItem(
        index=0,
        modality="video" if video else "image",
        grid_thw=(2, 2, rows) if video else (1, 2, 2 * rows),
        timestamps=np.array([0.1, 7.3], np.float32) if video else None,
        embeddings=np.full((rows, 8), value, NUMPY[dtype]),
        shape=(rows, 8),
        dtype=dtype,
        pool="eager",
        execution="eager",
        reason="tokens_over_budget",
        budget=None,
        num_tokens=rows,
        num_frames=4 if video else 1,
        width=16 * rows,
        height=32,
    )


def held(root: Path) -> dict[str, int]:
    """Name -> bytes of every file."""
    return {path.parent.name: path.stat().st_size for path in root.glob(f"*/{FILE}")}


def ledger(root: Path) -> int:
    return int((root / ".lock").read_text())


def temps(root: Path) -> list[Path]:
    return list(root.glob(".tmp-*"))


def age(root: Path, name: str, seconds: float) -> None:
    os.utime(root / name / FILE, (time.time() - seconds,) * 2)


class TestHash:
    @given(NAMED, NAMED)
    def test_equal_only_for_equal_inputs(self, one: Any, other: Any) -> None:
        names = [item_hash(media, options, **rest) for media, options, rest in (one, other)]
        assert all(re.fullmatch(r"[0-9a-f]{64}", name) for name in names)
        assert (names[0] == names[1]) == (one == other)

    @given(st.lists(st.binary(max_size=8), min_size=1, max_size=4), st.data())
    def test_where_one_still_ends_and_their_order_matter(self, stills: list[bytes], data: st.DataObject) -> None:
        other = data.draw(st.permutations(stills))
        joined = b"".join(stills)
        cut = data.draw(st.integers(0, len(joined)))
        for media in (other, [joined], [joined[:cut], joined[cut:]]):
            same = item_hash(media, MediaOptions(), **BASE) == item_hash(stills, MediaOptions(), **BASE)
            assert same == (media == stills)

    @pytest.mark.parametrize(
        "change",
        [
            {"options": MediaOptions(modality="image")},
            {"options": MediaOptions(min_pixels=1024)},
            {"options": MediaOptions(max_pixels=1024)},
            {"options": MediaOptions(fps=1.0)},
            {"options": MediaOptions(num_frames=1)},
            {"media": [b"photp"]},
            {"frames": True},
            {"checkpoint": "d"},
            {"compute_dtype": "bfloat16"},
            {"dtype": "bfloat16"},
            {"pooling": "mean"},
        ],
        ids=str,
    )
    def test_whatever_changes_the_result_changes_it(self, change: dict[str, Any]) -> None:
        base = {"media": [b"photo"], "options": MediaOptions(), **BASE}
        assert item_hash(**base) == item_hash(**base | {"media": [memoryview(b"photo")]})
        assert item_hash(**base | change) != item_hash(**base)


class TestFiles:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("video", [False, True])
    def test_a_reader_loads_what_was_put_and_a_repeat_is_answered(
        self, tmp_path: Path, dtype: str, video: bool, metrics: Recorded
    ) -> None:
        store = Store(tmp_path / "new" / "folder", NOTHING, 60)
        bits = np.random.default_rng(0).integers(0, 1 << 15, (6, 8)).astype(np.uint16)
        values = bits.astype(np.uint32).view(np.float32) if dtype == "float32" else bits.view(NUMPY[dtype])
        given_item = replace(item(6, dtype, video=video), index=3, embeddings=values)
        assert store.get(named(1), 0) is None
        new = store.put(named(1), given_item)
        assert new == replace(given_item, embeddings=None, hash=named(1), stored="new")

        # As ECExampleConnector.start_load_caches does.
        loaded = load_file(str(tmp_path / "new" / "folder" / named(1) / "encoder_cache.safetensors"), device="cpu")
        assert list(loaded) == ["ec_cache"]
        assert (loaded["ec_cache"].dtype, loaded["ec_cache"].shape) == (getattr(torch, dtype), (6, 8))
        assert np.array_equal(loaded["ec_cache"].view(torch.uint8).numpy(), values.view(np.uint8))

        hit = store.get(named(1), 7)
        assert hit is not None
        assert (hit.index, hit.stored, hit.embeddings) == (7, "hit", None)
        assert hit.facts() | {"index": 3, "stored": "new"} == new.facts()
        assert hit.grid_thw == given_item.grid_thw
        if video:
            assert hit.timestamps is not None
            assert hit.timestamps.dtype == np.float32
            assert np.array_equal(hit.timestamps, np.array([0.1, 7.3], np.float32))
        else:
            assert hit.timestamps is None
        assert metrics["foveal_store_items"] == {("new",): [1], ("hit",): [1]}
        assert (
            metrics["foveal_store_bytes"][()][-1]
            == ledger(tmp_path / "new" / "folder")
            == sum(held(tmp_path / "new" / "folder").values())
        )

    @pytest.mark.parametrize("damage", ["empty", "cut", "grown", "foreign", "noise"])
    def test_what_is_not_a_whole_file_of_ours_is_no_hit_and_is_replaced(self, tmp_path: Path, damage: str) -> None:
        store = Store(tmp_path, NOTHING, 60)
        store.put(named(1), item(value=1))
        path = tmp_path / named(1) / FILE
        whole = path.read_bytes()
        foreign = b'{"ec_cache": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        path.write_bytes(
            {
                "empty": b"",
                "cut": whole[:-1],
                "grown": whole + b"\0",
                "foreign": len(foreign).to_bytes(8, "little") + foreign + b"1234",
                "noise": b"\xff" * 100,
            }[damage]
        )
        assert store.get(named(1), 0) is None
        store.put(named(1), item(value=2))
        assert load_file(path)[TENSOR].eq(2).all()
        assert store.get(named(1), 0) is not None

    def test_the_first_of_two_writers_wins(self, tmp_path: Path) -> None:
        store = Store(tmp_path, NOTHING, 60)
        store.put(named(1), item(value=1))
        age(tmp_path, named(1), 1000)
        assert store.put(named(1), item(value=2)).stored == "new"
        assert load_file(tmp_path / named(1) / FILE)[TENSOR].eq(1).all()
        assert time.time() - (tmp_path / named(1) / FILE).stat().st_mtime < 60
        assert temps(tmp_path) == []
        assert ledger(tmp_path) == sum(held(tmp_path).values())

    def test_writers_of_one_name_at_once(self, tmp_path: Path) -> None:
        stores = [Store(tmp_path, NOTHING, 60) for _ in range(8)]
        start, answers = threading.Barrier(8), []

        def write(n: int) -> None:
            start.wait()
            answers.append(stores[n].put(named(1), item(1000, value=n + 1)))

        threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.hash for answer in answers] == [named(1)] * 8
        values = load_file(tmp_path / named(1) / FILE)[TENSOR].unique()
        assert len(values) == 1
        assert temps(tmp_path) == []
        assert ledger(tmp_path) == sum(held(tmp_path).values())

    def test_only_what_is_named_by_a_hash_is_counted_or_removed(self, tmp_path: Path) -> None:
        for name in ("readme.txt", "photos/a.png", f"{named(9)[:-1]}/{FILE}", f"{named(8).upper()}x/{FILE}"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(5000))
        store = Store(tmp_path, 1000, 0)
        for n in range(5):
            store.put(named(n), item())
        assert ledger(tmp_path) <= 1000
        assert (tmp_path / named(4) / FILE).exists()
        assert not (tmp_path / named(0)).exists()
        assert sum(path.stat().st_size == 5000 for path in tmp_path.rglob("*")) == 4

    def test_a_folder_that_a_reader_made_is_used_and_an_old_empty_one_is_removed(self, tmp_path: Path) -> None:
        for n in (1, 2, 3):
            (tmp_path / named(n)).mkdir()
        for n in (1, 2):
            os.utime(tmp_path / named(n), (time.time() - 1000,) * 2)
        store = Store(tmp_path, NOTHING, 60)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", named(3)]
        store.put(named(3), item())
        assert store.get(named(3), 0) is not None

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_file_system(self, tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store(tmp_path, NOTHING, 60)

        def full(fd: int) -> None:
            raise OSError(error, "full")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FovealError, match="full") as caught:
            store.put(named(1), item())
        assert (caught.value.code, caught.value.retry_after_s) == ("overloaded", 5)
        assert (temps(tmp_path), held(tmp_path), ledger(tmp_path)) == ([], {}, 0)

    def test_a_folder_that_cannot_be_used_is_refused_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            Store(tmp_path / "file", NOTHING, 60)


SIZE = 8 * 4 * 32  # bytes of the tensor of `item(32)`; a header is under 700


class TestBound:
    def test_the_least_recently_used_go_first_and_a_hit_counts_as_use(self, tmp_path: Path, metrics: Recorded) -> None:
        store = Store(tmp_path, 4 * (SIZE + 700), 10)
        for n in range(4):
            store.put(named(n), item(32))
            age(tmp_path, named(n), 1000 - n)
        store = Store(tmp_path, 4 * (SIZE + 700), 10)  # one that has just looked at the folder
        assert store.get(named(0), 0) is not None
        store.put(named(4), item(32))
        assert set(held(tmp_path)) == {named(n) for n in (0, 2, 3, 4)}
        store.put(named(5), item(32))
        assert set(held(tmp_path)) == {named(n) for n in (0, 3, 4, 5)}
        assert not (tmp_path / named(1)).exists()
        assert ledger(tmp_path) == sum(held(tmp_path).values()) <= 4 * (SIZE + 700)
        assert metrics["foveal_store_evictions"] == {(): [1, 1]}

    def test_what_went_before_a_refusal_is_not_counted(self, tmp_path: Path) -> None:
        for n, seconds in ((0, 200), (1, 60), (2, 60)):
            Store(tmp_path, NOTHING, 100).put(named(n), item(32))
            age(tmp_path, named(n), seconds)
        store = Store(tmp_path, 3 * (SIZE + 700), 100)
        with pytest.raises(FovealError):
            store.put(named(3), item(96))
        assert set(held(tmp_path)) == {named(1), named(2)}
        assert ledger(tmp_path) == sum(held(tmp_path).values())

    def test_no_file_goes_inside_its_lease(self, tmp_path: Path, metrics: Recorded) -> None:
        for n, seconds in ((0, 60), (1, 80)):
            Store(tmp_path, NOTHING, 100).put(named(n), item(32))
            age(tmp_path, named(n), seconds)
        store = Store(tmp_path, 2 * (SIZE + 700), 100)
        before = ledger(tmp_path)
        with pytest.raises(FovealError, match=r"store\.lease_s") as caught:
            store.put(named(2), item(32))
        assert (caught.value.code, caught.value.status) == ("overloaded", 503)
        assert caught.value.retry_after_s in (20, 21)
        assert (set(held(tmp_path)), temps(tmp_path), ledger(tmp_path)) == ({named(0), named(1)}, [], before)
        assert metrics["foveal_store_items"][("refused",)] == [1]
        assert store.get(named(1), 0) is not None
        age(tmp_path, named(0), 101)
        Store(tmp_path, 2 * (SIZE + 700), 100).put(named(2), item(32))
        assert set(held(tmp_path)) == {named(1), named(2)}

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.sampled_from(["put", "put", "get"]),
                st.integers(0, 7),
                st.integers(1, 40),
                st.sampled_from([0.001, 0.4, 3.0, 11.0]),
            ),
            max_size=40,
        )
    )
    def test_as_a_model_says(self, steps: list[tuple[int, str, int, int, float]]) -> None:
        """Three processes' stores of one folder against a dict in order of use, by a clock that the test moves."""
        lease_s, bound, now = 10.0, 6000, [1e9]
        model: dict[str, tuple[float, int]] = {}
        with tempfile.TemporaryDirectory() as folder, moved_clock(now):
            root = Path(folder)
            stores = [Store(root, bound, lease_s) for _ in range(3)]
            for who, what, n, rows, seconds in steps:
                now[0] += seconds
                name = named(n)
                if what == "get":
                    assert (stores[who].get(name, 0) is not None) == (name in model)
                    if name in model:
                        model[name] = (now[0], model[name][1])
                else:
                    size = written_size(rows)
                    used = sum(size for _, size in model.values())
                    refused = False
                    while used + size > bound:
                        oldest = min(model, key=lambda key: model[key][0])
                        if now[0] - model[oldest][0] < lease_s:
                            refused = True
                            break
                        used -= model.pop(oldest)[1]
                    if refused:
                        with pytest.raises(FovealError):
                            stores[who].put(name, item(rows))
                    else:
                        stores[who].put(name, item(rows))
                        model[name] = (now[0], model.get(name, (0, size))[1])
                assert held(root) == {name: size for name, (_, size) in model.items()}
                assert ledger(root) == sum(held(root).values()) <= bound
                assert temps(root) == []


@cache
def written_size(rows: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        Store(Path(folder), NOTHING, 60).put(named(0), item(rows))
        return held(Path(folder))[named(0)]


@contextmanager
def moved_clock(now: list[float]) -> Iterator[None]:
    """Files are used at `now[0]`, and the store believes that it is `now[0]`."""
    real = os.utime

    def utime(path: Any) -> None:
        real(path, ns=(int(now[0] * 1e6) * 1000,) * 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "utime", utime)
        patch.setattr(store_module, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
        yield


def run_until_stopped(body: Callable[[random.Random], None], seed: int, stop: Any) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        body(rng)


class TestProcesses:
    def test_a_killed_writer_leaves_no_half_file_and_nothing_that_counts(self, tmp_path: Path) -> None:
        """Every file ever seen is whole, although its writers are killed at any moment."""
        rows, rounds = 20_000, 12  # 640 kB: a write takes a while

        def write(rng: random.Random) -> None:
            n = rng.randrange(1, 1 << 30)
            Store(tmp_path, NOTHING, 60).put(named(n), item(rows, value=n % 1000))

        rng, cut_short = random.Random(7), 0
        for seed in range(rounds):
            stop = FORK.Event()
            writer = FORK.Process(target=run_until_stopped, args=(write, seed, stop))
            writer.start()
            deadline = time.monotonic() + rng.uniform(0.05, 0.25)
            while time.monotonic() < deadline:
                for name in held(tmp_path):
                    values = load_file(tmp_path / name / FILE)[TENSOR]
                    assert values.shape == (rows, 8)
                    assert values.eq(int(name, 16) % 1000).all()
            while not temps(tmp_path):
                pass
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            cut_short += bool(temps(tmp_path))
            store = Store(tmp_path, NOTHING, 60)
            assert temps(tmp_path) == []
            assert ledger(tmp_path) == sum(held(tmp_path).values())
            for name in held(tmp_path):
                assert store.get(name, 0) is not None
                if rng.random() < 0.8:
                    (tmp_path / name / FILE).unlink()
        assert cut_short >= 1, "no writer was killed while it wrote"

    def test_a_scan_leaves_a_living_writers_file_alone(self, tmp_path: Path) -> None:
        store = Store(tmp_path, 10_000, 0)
        with store._reserved(9_000) as file:
            assert ledger(tmp_path) == 9_000
            Store(tmp_path, 10_000, 0)
            assert [path.name for path in temps(tmp_path)] == [os.path.basename(file.name)]
            assert ledger(tmp_path) == 9_000
            with pytest.raises(FovealError, match="no room"):
                store.put(named(1), item(32))
        assert (temps(tmp_path), ledger(tmp_path)) == ([], 0)

    def test_processes_share_one_bound(self, tmp_path: Path) -> None:
        """Four processes write and read 24 names in room for about 8; what a hit promises is there for its lease."""
        rows, bound, lease_s = 1000, 8 * 33_000, 0.02
        broken = FORK.Queue()

        def work(rng: random.Random) -> None:
            store = stores[os.getpid()] = stores.get(os.getpid()) or Store(tmp_path, bound, lease_s)
            n = rng.randrange(24)
            try:
                started = time.monotonic()
                if store.get(named(n), 0) is None:
                    store.put(named(n), item(rows, value=n))
                try:
                    values = load_file(tmp_path / named(n) / FILE)[TENSOR]
                    if not values.eq(n).all():
                        broken.put(f"{n}: {values}")
                except FileNotFoundError:
                    if time.monotonic() - started < lease_s:
                        broken.put(f"{n} went inside its lease")
            except FovealError as error:
                if error.code != "overloaded":
                    raise

        stores: dict[int, Store] = {}
        stop = FORK.Event()
        workers = [FORK.Process(target=run_until_stopped, args=(work, seed, stop)) for seed in range(4)]
        for worker in workers:
            worker.start()
        most, until = 0, time.monotonic() + 3
        while time.monotonic() < until:
            # Under the lock, as a sum over files that come and go meanwhile is of no one moment.
            with suppress(FileNotFoundError), (tmp_path / ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
                most = max(most, sum(held(tmp_path).values()))
            time.sleep(0.005)
        stop.set()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        assert broken.empty(), broken.get()
        assert 5 * 33_000 < most <= bound
        assert ledger(tmp_path) == sum(held(tmp_path).values())
        assert temps(tmp_path) == []
