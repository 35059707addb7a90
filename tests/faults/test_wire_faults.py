"""The wire under attack: only `WireError` comes out, and a worker can't make the parent allocate what it likes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import tempfile
import zlib
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.ipc.decoder import LAZY_BYTES, Decoder
from aioenv.ipc.frames import HEADER_BYTES, MAGIC, MAX_FIXED_BYTES, MAX_PAYLOAD_BYTES, VERSION, Kind
from aioenv.worker.worker_end import WorkerEnd
from tests.faults.fuzz import Fuzzer
from tests.kits.wire_kit import (
    FrameFields,
    decode_until_error,
    encode_all,
    no_more_memory_than,
    plain,
    raw_header,
    readers,
)

# What the fuzzer itself keeps, and what a case of a few hundred bytes may take.
FUZZ_BYTES = 4 << 20
MIB = 1 << 20


def resident() -> int:
    """The memory that this process really has, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- fuzzing


def fuzz(seed: int, cases: int) -> None:
    """Cases at full speed, under an eye on the whole process; then some more with every allocation counted."""
    fuzzer = Fuzzer(seed)
    before = resident()
    for _ in range(10):
        fuzzer.run(cases * 9 // 100)
        assert resident() - before < 64 * MIB
    with no_more_memory_than(FUZZ_BYTES):
        fuzzer.run(cases - fuzzer.spoiled - fuzzer.forged)
    assert fuzzer.spoiled + fuzzer.forged == cases
    assert fuzzer.errors > 0.8 * cases, "most mutations do damage"


@pytest.mark.parametrize("seed", range(4))
def test_only_wire_errors_come_out(seed):
    fuzz(seed, 5_000)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 110))
def test_only_wire_errors_come_out_of_a_million_cases(seed):
    fuzz(seed, 100_000)


# ---------------------------------------------------------------- limits


@readers
@pytest.mark.parametrize("length", [1, 4, 6, 1 << 20, MAX_FIXED_BYTES])
def test_an_unexpected_fixed_part_takes_no_memory(read, length):
    """A header with a good CRC, and a length that is not that of the reply that was promised a place."""
    data = encode_all([FrameFields(Kind.RESULT, 1, 0, [b"12345"], b"")])[0]
    chain = struct.unpack("<I", data[HEADER_BYTES - 4 : HEADER_BYTES])[0]
    head = struct.pack("<2sBBIIIII", MAGIC, VERSION, Kind.RESULT, 1, 0, length, 0, 0)
    data += head + struct.pack("<I", zlib.crc32(head, chain))
    place = [memoryview(bytearray(5))]
    decoder = Decoder(lambda header: place if header.request == 1 else None, max_scratch=0)
    with no_more_memory_than(50_000):
        got, error = decode_until_error(read, decoder, data, [HEADER_BYTES])
    assert got == [(Kind.RESULT, 1, 0, b"12345", b"")]
    assert f"a RESULT frame has a fixed part of {length} bytes where 5 are expected" in str(error)


@readers
def test_a_payload_over_the_limit_takes_no_memory(read):
    with no_more_memory_than(50_000):
        got, error = decode_until_error(
            read, Decoder(max_payload=10), raw_header(payload=11) + bytes(11), [HEADER_BYTES]
        )
    assert got == [] and "announces a payload of 11 bytes, over 10" in str(error)
    whole = encode_all([FrameFields(Kind.RESULT, 1, 0, [], b"0123456789")])[0]
    assert decode_until_error(read, Decoder(max_payload=10), whole, [7])[1] is None


@pytest.mark.parametrize("lengths", [{"payload": MAX_PAYLOAD_BYTES}, {"fixed": MAX_FIXED_BYTES}], ids=str)
def test_what_is_announced_costs_nothing_until_it_comes(lengths):
    before = resident()
    decoder = Decoder()
    decoder.feed(raw_header(**lengths) + bytes(2 * MIB))
    assert decoder.next_frame() is None and not decoder.idle
    assert resident() - before < 16 * MIB


@readers
@pytest.mark.parametrize("size", [LAZY_BYTES - 1, LAZY_BYTES, LAZY_BYTES + 1, 50_000_000])
def test_large_parts_arrive_whole(read, size):
    sent = FrameFields(Kind.RESULT, 1, 0, [bytes(7) + os.urandom(size - 7)], os.urandom(size))
    frames = list(read(Decoder(), encode_all([sent])[0], [1 << 24]))
    assert plain(frames[0]) == sent.plain()


# ---------------------------------------------------------------- a worker that lies


class Liar(gym.Env):
    """Finds the link that its worker writes to, and writes what it was not asked for."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float64)
    action_space = gym.spaces.Discrete(3)
    HONEST, UNASKED, ANNOUNCE = range(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3), {}

    def step(self, action):
        if action != self.HONEST:
            import sys

            frame = sys._getframe()
            while not isinstance(frame.f_locals.get("channel"), WorkerEnd):
                frame = frame.f_back
            link = frame.f_locals["channel"]
            if action == self.UNASKED:
                link.write(Kind.RESULT, 10**6, 0, [bytes(1 << 20)])
            else:
                head = struct.pack("<2sBBIIIII", MAGIC, VERSION, Kind.RESULT, 2, 0, MAX_FIXED_BYTES, 0, 0)
                crc = zlib.crc32(head, link._encoder.chain)
                os.write(link._write_fd, head + struct.pack("<I", crc) + bytes(1000))
        return np.ones(3), 1.0, False, False, {}


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lie", [Liar.UNASKED, Liar.ANNOUNCE], ids=["unasked", "announce"])
async def test_a_worker_that_lies_is_ended_and_named(lie):
    async with aioenv.AsyncVectorEnv([Liar] * 2, num_workers=2) as envs:
        await envs.reset(seed=0)
        before = resident()
        with pytest.raises(aioenv.WorkerDied, match="fixed part of") as caught:
            await envs.step([0, lie])
        assert resident() - before < 16 * MIB
        assert caught.value.slots == (1,) and caught.value.partial.obs[0].tolist() == [1, 1, 1]
        envs.send([0], [0])
        assert (await envs.recv()).slots.tolist() == [0]


# ---------------------------------------------------------------- nothing that others could find


class Deaf(gym.Env):
    """Closes all that it could be heard by, and stays."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, when: str) -> None:
        self.when = when
        self.leave("start")

    def leave(self, when: str) -> None:
        if when == self.when:
            os.closerange(0, os.sysconf("SC_OPEN_MAX"))
            signal.pause()

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.leave("step")
        return 0, 0.0, False, False, {}


@pytest.mark.asyncio
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
async def test_a_worker_that_has_closed_its_end_and_stays_is_said_to_have(start):
    words = "it closed its end, and had not exited"
    with pytest.raises(aioenv.WorkerStartError, match=words):
        await aioenv.AsyncVectorEnv([lambda: Deaf("start")], start=start)
    async with aioenv.AsyncVectorEnv([lambda: Deaf("step")], start=start) as envs:
        await envs.reset()
        with pytest.raises(aioenv.WorkerDied, match=words) as caught:
            await envs.step([0])
        assert caught.value.running == 0


def files_of(pid: int) -> set[str]:
    """What a process has open, sockets ("socket:[inode]") among it, and what it shares by name."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(fd))
    return found | set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))


def open_to_others(pids: set[int]) -> list[str]:
    """Sockets of these that other processes could connect to: of the internet families, or Unix ones with a name."""
    mine = {name[8:-1] for pid in pids for name in files_of(pid) if name.startswith("socket:[")}
    found = []
    for family in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/net/{family}").read_text().splitlines()[1:]
        found += [f"{family} {line.strip()}" for line in lines if line.split()[9] in mine]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        listens, named = int(fields[3], 16) & 0x10000, len(fields) > 7
        if fields[6] in mine and (listens or named):
            found.append(f"unix {line.strip()}")
    return found


def family_of(pid: int) -> set[int]:
    """A process and its descendants."""
    pids = {pid}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids |= family_of(int(child))
    return pids


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_nothing_that_another_user_could_find_or_connect_to(tmp_path, monkeypatch):
    shared = tmp_path / "temporary"
    shared.mkdir()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)  # look the variables up again
    assert tempfile.gettempdir() == str(shared)
    inherited = files_of(os.getpid())
    async with aioenv.make_vec("CartPole-v1", 4, num_workers=2) as envs:
        await envs.reset(seed=0)
        await envs.step(np.zeros(4, np.int64))
        pids = family_of(os.getpid())
        assert len(pids) >= 4, "this process, two workers, and who guards them"
        assert open_to_others(pids) == []
        assert os.listdir(shared) == []
        files = set().union(*map(files_of, pids)) - inherited
        assert not [f for f in files if f.startswith((str(shared), "/dev/shm", "/tmp", "/var/tmp"))]
