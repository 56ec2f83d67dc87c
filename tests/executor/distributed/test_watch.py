"""How a rank notices that another has failed; two in one process here, which see each other in the store alone."""

import datetime as dt
import threading
import time

import pytest
import torch.distributed as dist

from executor.distributed import watchdog
from executor.distributed.watchdog import RankError, Watchdog


class Lost:
    """A store that can be lost."""

    def __init__(self, store):
        self.store = store
        self.is_lost = False

    def __getattr__(self, name):
        if self.is_lost:
            raise ConnectionResetError("connection reset by peer")
        return getattr(self.store, name)


@pytest.fixture
def pair():
    """Two watches that have met, and what the first was told; neither has begun."""
    store, watches = dist.HashStore(), {}
    lost = Lost(store)
    threads = [
        threading.Thread(target=lambda r=r, s=s: watches.update({r: Watchdog(s, r, 2, silence_s=0.6)}))
        for r, s in enumerate((lost, store))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reported = []
    watches[0].start(reported.append)
    yield watches[0], watches[1], reported, lost
    for watch in watches.values():
        watch.stop(on_all_ranks=False)


def wait_for(reported):
    end_s = time.monotonic() + 10
    while not reported:
        assert time.monotonic() < end_s, "nothing was noticed"
        time.sleep(0.02)
    return str(reported[0])


def test_what_a_rank_says_reaches_the_others(pair):
    first, second, reported, _ = pair
    first.check()
    second.report_failure(ZeroDivisionError("by nothing"))
    second.report_failure(ValueError("the first word counts"))
    assert wait_for(reported) == "rank 1 failed: ZeroDivisionError: by nothing"
    with pytest.raises(RankError, match="by nothing"):
        first.check()
    assert first.explain(RuntimeError("connection closed")) is reported[0]


def test_silence_is_noticed(pair):
    _, _, reported, _ = pair
    assert wait_for(reported) == "rank 1 has sent no heartbeat for 0.6 s"


def test_who_gives_signs_or_has_left_is_not_missed(pair):
    _, second, reported, _ = pair
    heard = []
    second.start(heard.append)
    time.sleep(1.5)
    second.stop(on_all_ranks=True)
    time.sleep(1.5)
    assert (reported, heard) == ([], [])


def test_a_rank_may_wait_in_a_collective_of_the_users_own(pair):
    """As in a barrier, while rank 0 alone saves; here in the meeting of a group that nobody else joins."""
    first, second, reported, _ = pair
    first.waits_for = lambda: ("a read of weights", 7)
    heard = []
    second.start(heard.append)
    with pytest.raises(dist.DistError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=dt.timedelta(seconds=4))
    assert "0 is in a read of weights, and rank 1 in torch.distributed.init_process_group()" in wait_for(reported)
    assert wait_for(heard) == str(reported[0])


def test_a_rank_may_wait_for_another_model(pair, monkeypatch):
    """As if ranks trained two models in different orders: each waits in a session of its own."""
    first, second, reported, _ = pair
    monkeypatch.setattr(watchdog, "_WAITS", [lambda: ("iteration 1", 7)])
    first.waits_for = lambda: ("iteration 1", 7)
    second.start(lambda _error: None)
    assert "0 is in iteration 1, and rank 1 in iteration 1 of another model, and each" in wait_for(reported)


def test_a_lost_store_is_a_lost_rank(pair):
    _, second, reported, lost = pair
    second.start(lambda _error: None)
    lost.is_lost = True
    assert "rank 0, or the process that served the ranks' store, has ended" in wait_for(reported)


def test_a_failure_of_others_is_not_reported_as_ones_own(pair):
    first, second, reported, _ = pair
    second.start(lambda _error: None)
    second.report_failure(RankError("rank 0 failed: on its own"))
    time.sleep(0.5)
    assert not reported
    first.check()


def test_a_broken_collective_explains_itself_if_nobody_does(pair):
    first, second, _, _ = pair
    second.start(lambda _error: None)
    assert "ranks can no longer reach each other: connection closed" in str(
        first.explain(RuntimeError("connection closed"))
    )


def test_a_rank_that_fails_on_its_own_waits_for_no_other_reason(pair):
    """Its lanes may be in collectives that the others have left: they too failed on their own, and reported later."""
    first, second, reported, _ = pair
    second.start(lambda _error: None)
    explained = []
    thread = threading.Thread(target=lambda: explained.append(first.explain(RuntimeError("connection closed"))))
    thread.start()
    first.report_failure(ValueError("refused"))
    second.report_failure(ValueError("refused"))
    thread.join(0.4)  # others that say nothing are waited for longer
    assert "ranks can no longer reach each other: connection closed" in str(explained[0])
    assert not reported
