"""What would go wrong on a device that runs everything as late as it may: found by logic, in any run.

[Note: Happens before] Streams and threads of the host each have a vector clock (Lamport 1978, Mattern 1989): for every
other one, how far that has certainly come. A launch passes the thread's clock to the stream; an event takes the clock
of its stream along to who waits for it, stream or thread; a lane of the machine hands its clock on to lanes that wait
for its tasks. Two accesses to the same bytes, one of which writes, of which neither certainly comes first, are a race:
here the kernel has long run, but on a GPU nobody knows.

Memory that is freed is soon somebody else's. The allocator keeps it for the stream on which it was taken, so whatever
other streams still do with it is a race, unless they were recorded (``Tensor.record_stream``).
"""

import bisect
import collections
import dataclasses
import threading
from typing import NamedTuple

CALLER = "caller"


def this_thread():
    """Return who acts for the host: a lane, or the caller, whose backward runs in a thread of autograd's."""
    name = threading.current_thread().name
    return name if name.startswith("lane ") else CALLER


class _Access(NamedTuple):
    start: int
    stop: int
    writes: bool
    agent: object
    thread: str  # that launched it
    time: int
    what: str


@dataclasses.dataclass
class _Block:
    stop: int
    stream: object = None  # on which it was taken; None: the host's
    streams: set = dataclasses.field(default_factory=set)
    accesses: list = dataclasses.field(default_factory=list)


class Races:
    """Watches the device; see [Note: Happens before].

    Attributes:
        found: what was a race, in words; each once.
        pageable: copies that were asked to be asynchronous and cannot be, by the thread that asked.
        waits: how often each thread waited for the device, by its task, and for what.
        num_accesses: that were looked at.
    """

    def __init__(self):
        self.found = {}
        self.pageable = collections.Counter()
        self.waits = collections.Counter()
        self.num_accesses = 0
        self.task = {}  # what each thread is at
        self._lock = threading.RLock()
        self._clocks = collections.defaultdict(dict)
        self._events = {}
        self._blocks = {}
        self._starts = []
        self._lanes = {}  # names of streams

    # What the device tells.

    def launched(self, name, stream, ranges):
        with self._lock:
            thread = this_thread()
            self._lanes.setdefault(stream, thread)
            clock = self._clocks[stream]
            _join(clock, self._clocks[thread])
            what = f"{name} ({self.task.get(thread, 'no task')})"
            self._access(stream, thread, clock, ranges, what)

    def crossed(self, non_blocking, asynchronous, num_bytes):
        if non_blocking and not asynchronous and num_bytes:
            self.pageable[self.task.get(this_thread(), this_thread())] += 1

    def allocated(self, start, num_bytes, stream):
        self._add(start, num_bytes, stream)

    def freed(self, start):
        with self._lock:
            block = self._blocks.pop(start, None)
            if block is None:
                return
            del self._starts[bisect.bisect_left(self._starts, start)]
            if block.stream is None:
                return
            clock = dict(self._clocks[block.stream])
            _join(clock, self._clocks[this_thread()])
            for access in block.accesses:
                # Whoever launched it had the tensor until then, or until it had waited for it.
                known = max(clock.get(access.agent, 0), self._clocks[access.thread].get(access.agent, 0))
                if access.agent not in block.streams and access.time > known:
                    where = f"{self._name(block.stream)}'s, by {self._words(this_thread())}"
                    self._report(
                        f"memory of {where}, was freed while {access.what} on {self._name(access.agent)} may run"
                    )

    def kept_for(self, start, stream):
        with self._lock:
            if start in self._blocks:
                self._blocks[start].streams.add(stream)

    def recorded(self, event, stream):
        with self._lock:
            self._events[event] = dict(self._clocks[stream])
            _join(self._events[event], self._clocks[this_thread()])

    def followed(self, event, stream):
        with self._lock:
            _join(self._clocks[stream], self._events[event])

    def waited(self, event):
        with self._lock:
            self.waits[self._words(this_thread()), "event"] += 1
            _join(self._clocks[this_thread()], self._events[event])

    def waited_for_stream(self, stream):
        with self._lock:
            self.waits[self._words(this_thread()), "stream"] += 1
            _join(self._clocks[this_thread()], self._clocks[stream])

    def waited_for_all(self):
        with self._lock:
            for stream in self._lanes:
                _join(self._clocks[this_thread()], self._clocks[stream])

    # What the host does.

    def pinned(self, start, num_bytes):
        self._add(start, num_bytes, None)

    def unpinned(self, start):
        self.freed(start)

    def touched(self, start, num_bytes, what, *, writes):
        """The host itself reads or writes memory."""
        with self._lock:
            thread = this_thread()
            self._access(
                thread, thread, self._clocks[thread], [(start, num_bytes, writes)], f"{what} ({self._words(thread)})"
            )

    def moment(self):
        """Return how far the calling thread has come, to be handed to another."""
        with self._lock:
            return dict(self._clocks[this_thread()])

    def met(self, moment):
        """The calling thread has waited for another to come to a moment."""
        with self._lock:
            _join(self._clocks[this_thread()], moment)

    def met_caller(self):
        """The calling thread has waited for the thread that adds gradients up, which acts as the caller."""
        with self._lock:
            _join(self._clocks[this_thread()], self._clocks[CALLER])

    def met_all(self):
        """The calling thread has waited for all lanes to come to rest."""
        with self._lock:
            for agent in [agent for agent in self._clocks if isinstance(agent, str)]:
                _join(self._clocks[this_thread()], self._clocks[agent])

    # How it judges.

    def _add(self, start, num_bytes, stream):
        with self._lock:
            bisect.insort(self._starts, start)
            self._blocks[start] = _Block(start + num_bytes, stream)

    def _access(self, agent, thread, clock, ranges, what):
        time = clock[agent] = clock.get(agent, 0) + 1
        for start, num_bytes, writes in ranges:
            position = bisect.bisect_right(self._starts, start) - 1
            if not num_bytes or position < 0:
                continue
            block = self._blocks[self._starts[position]]
            if start < block.stop:
                self.num_accesses += 1
                self._judge(block, _Access(start, start + num_bytes, writes, agent, thread, time, what), clock)

    def _judge(self, block, new, clock):
        remaining = []
        for old in block.accesses:
            if old.start < new.stop and new.start < old.stop:
                ordered = old.time <= clock.get(old.agent, 0)
                if not ordered and (old.writes or new.writes):
                    self._report(
                        f"{new.what} on {self._name(new.agent)} {'writes' if new.writes else 'reads'} what {old.what} "
                        f"on {self._name(old.agent)} {'writes' if old.writes else 'reads'}"
                    )
                covers = new.start <= old.start and old.stop <= new.stop
                if covers and ordered and (new.writes or (old.agent == new.agent and not old.writes)):
                    continue  # whatever conflicts with it conflicts with the new one too
            remaining.append(old)
        block.accesses = [*remaining, new]

    def _name(self, agent):
        return agent if isinstance(agent, str) else f"the stream of {self._lanes.get(agent, agent)}"

    def _words(self, thread):
        return self.task.get(thread, thread)

    def _report(self, what):
        self.found[what] = self.found.get(what, 0) + 1


def _join(clock, other):
    for agent, time in other.items():
        if time > clock.get(agent, 0):
            clock[agent] = time
