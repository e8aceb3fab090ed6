"""The storage tracker: what it counts, what it does not disturb, and how it ends."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lightning_sonar.memory import StorageTracker


class SmallMoE(nn.Module):
    """Embedding, a router, two batched expert tensors, a head."""

    def __init__(self, experts=4, hidden=16, inner=32, vocab=50):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * 0.1)  # [E, 2I, H]
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) * 0.1)  # [E, H, I]
        self.head = nn.Linear(hidden, vocab)

    def block(self, x):  # [T, H] -> [T, H]
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        gate, up = torch.einsum("th,eih->eti", y, self.up).chunk(2, dim=-1)
        out = torch.einsum("eti,ehi->eth", nn.functional.silu(gate) * up, self.down)
        return x + torch.einsum("eth,te->th", out, weights)

    def checkpointed(self, x):
        # A generator's state is made without an operator, so no dispatch mode can see those 5,056 bytes.
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)

    def forward(self, ids, checkpointing=False):
        x = self.embed(ids.flatten())
        x = self.checkpointed(x) if checkpointing else self.block(x)
        return nn.functional.cross_entropy(self.head(x), ids.flatten())


def profiler_levels(prof):
    """Live bytes after each allocation and release that torch's profiler saw."""
    level, levels = 0, []
    memory = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(memory, key=lambda e: e.start_ns()):
        level += event.nbytes()
        levels.append(level)
    return levels


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tracker_agrees_with_torch_profiler_to_the_byte(checkpointing):
    torch.manual_seed(0)
    model, ids = SmallMoE(), torch.randint(0, 50, (4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tracker = StorageTracker()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof, tracker:
        loss = model(ids, checkpointing)
        loss.backward()
        optimizer.step()
        del loss
    levels = profiler_levels(prof)
    assert tracker.ledger.peak_bytes == max(levels)
    assert tracker.ledger.live_bytes == levels[-1] > 0


def test_fake_tensors_count_the_same_as_real_ones():
    def measure():
        model, ids = SmallMoE(), torch.zeros(4, 8, dtype=torch.long)
        with StorageTracker() as tracker:
            tracker.track(model.parameters(), "parameters")
            model(ids).backward()
        return tracker.ledger.peak_bytes, tracker.ledger.live_bytes

    real = measure()
    with FakeTensorMode():
        fake = measure()
    assert fake == real


def test_views_count_once():
    with StorageTracker() as tracker:
        x = torch.empty(10, 10)
        views = [x.view(100), x[3], x.t(), x.detach(), x.untyped_storage()]
    assert tracker.ledger.live_bytes == 400
    del views
    assert tracker.ledger.live_bytes == 400


def test_tracking_keeps_nothing_alive_and_sees_deaths_after_stop():
    with StorageTracker() as tracker:
        x = torch.empty(100)
        alive = weakref.ref(x.untyped_storage())
    assert tracker.ledger.live_bytes == 400
    del x
    assert alive() is None
    assert tracker.ledger.live_bytes == 0
    (record,) = tracker.ledger.records
    assert (record.birth, record.death, record.op) == (0, 1, "aten.empty.memory_format")


def test_a_view_of_an_untracked_tensor_is_no_birth():
    x = torch.ones(100)
    with StorageTracker() as tracker:
        y = x.view(10, 10)
        y.add_(1)
        assert tracker.ledger.live_bytes == 0
        tracker.track([x], "parameters")
        z = y[0]
    assert tracker.ledger.breakdown_at(0) == {"parameters": 400}
    del z


def test_a_reused_address_belongs_to_the_new_storage():
    addresses = set()
    with StorageTracker() as tracker:
        for _ in range(50):
            x = torch.empty(1000)
            tracker.label(x, "old")
            addresses.add(x.untyped_storage()._cdata)
            del x
        fresh = [torch.empty(1000) for _ in range(200)]
    reused = [x for x in fresh if x.untyped_storage()._cdata in addresses]
    assert reused, "the allocator gave only new addresses; the test shows nothing"
    assert tracker.ledger.breakdown_at(tracker.ledger.events - 1) == {"other": 200 * 4000}


def test_deaths_in_other_threads_are_counted():
    with StorageTracker() as tracker:
        boxes = [[torch.empty(10) for _ in range(200)] for _ in range(8)]
        assert tracker.ledger.live_bytes == 8 * 200 * 40
        threads = [threading.Thread(target=box.clear) for box in boxes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tracker.ledger.live_bytes == 0
    assert tracker.ledger.peak_bytes == 8 * 200 * 40


def test_a_late_label_counts_for_the_whole_life():
    with StorageTracker() as tracker:
        first, second = torch.empty(10), torch.empty(20)
        tracker.label(first, "gradient")
        del first
        third = torch.empty(30)
        tracker.label(second, "gradient")
        tracker.label(third.view(5, 6), "gradient")
    assert tracker.ledger.peak_of("gradient") == 200
    assert tracker.ledger.peak_count_of("gradient") == 2
    assert tracker.ledger.breakdown_at(1) == {"gradient": 120}
    assert tracker.ledger.peak_of("nothing") == tracker.ledger.peak_count_of("nothing") == 0


def test_resized_storages_count_with_their_new_size():
    with StorageTracker() as tracker:
        x = torch.empty(10)
        x.resize_(100)
        assert tracker.ledger.live_bytes == 400
        x.untyped_storage().resize_(0)
        assert tracker.ledger.live_bytes == 0
        x.untyped_storage().resize_(80)
        assert tracker.ledger.live_bytes == 80
        out = torch.empty(0)
        torch.add(torch.ones(5), 1, out=out)
        assert tracker.ledger.live_bytes == 100
    assert tracker.ledger.peak_bytes == 400
    assert "resize_" not in vars(torch.UntypedStorage)
    del x, out
    assert tracker.ledger.live_bytes == 0


def test_sizes_are_rounded_as_the_allocator_does():
    with StorageTracker(rounding=512) as tracker:
        tensors = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]
    assert tracker.ledger.live_bytes == 512 + 512 + 1024
    del tensors


def test_a_device_filter_leaves_other_devices_out():
    with StorageTracker(device="cpu") as tracker:
        tensors = [torch.empty(10), torch.empty(1000, device="meta")]
    assert tracker.ledger.live_bytes == 40
    del tensors


def test_wrapper_subclasses_count_as_what_is_inside():
    with StorageTracker() as tracker:
        pair = TwoTensor(torch.ones(10), torch.ones(10))
        total = pair + pair
        assert tracker.ledger.live_bytes == 160
        tracker.track([total], "sum")
    assert tracker.ledger.breakdown_at(tracker.ledger.events - 1) == {"other": 80, "sum": 80}


def test_sparse_gradients_are_counted():
    embedding = nn.Embedding(1000, 8, sparse=True)
    with StorageTracker() as tracker:
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        assert embedding.weight.grad is not None
        tracker.label(embedding.weight.grad, "gradient")
    assert tracker.ledger.peak_of("gradient") == 3 * 8 * 4 + 3 * 8


def test_a_phase_holds_what_is_alive_when_it_begins():
    with StorageTracker() as tracker:
        x = torch.empty(100)
        tracker.mark("first")
        y = torch.empty(25)
        tracker.mark("second")
        tracker.mark("second")
        del x
        tracker.mark("third")
        z = torch.empty(10)
    ledger = tracker.ledger
    assert ledger.peak_per_phase == {"first": 500, "second": 500, "third": 140}
    assert (ledger.peak_phase, ledger.peak_op) == ("first", "aten.empty.memory_format")
    assert [record.phase for record in ledger.records] == ["first", "first", "third"]
    assert ledger.curves() == {"other": ledger.levels}
    del y, z


def test_curves_by_label_add_up_to_live_bytes():
    model = SmallMoE()
    with StorageTracker() as tracker:
        tracker.track(model.parameters(), "parameters")
        model(torch.zeros(2, 4, dtype=torch.long)).backward()
        tracker.track([p.grad for p in model.parameters() if p.grad is not None], "gradients")
    curves = tracker.ledger.curves()
    assert set(curves) == {"parameters", "gradients", "other"}
    assert [sum(values) for values in zip(*curves.values(), strict=True)] == tracker.ledger.levels
    some = [0, 5, tracker.ledger.events - 1]
    assert tracker.ledger.curves(some)["other"] == [curves["other"][event] for event in some]
    at_peak = tracker.ledger.breakdown_at(tracker.ledger.peak_event)
    assert sum(at_peak.values()) == tracker.ledger.peak_bytes
    size = sum(p.numel() for p in model.parameters()) * 4
    assert at_peak["parameters"] == tracker.ledger.peak_of("gradients") == size


def test_stop_leaves_the_modes_of_others_alone():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    tracker, other = StorageTracker().start(), Other()
    other.__enter__()
    tracker.stop()
    assert _get_current_dispatch_mode() is other
    other.__exit__(None, None, None)
    assert _get_current_dispatch_mode() is None


def test_an_exception_inside_ends_the_tracking():
    tracker = StorageTracker()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), tracker:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not tracker.running
    assert _get_current_dispatch_mode() is None
    gc.collect()
    assert tracker.ledger.live_bytes == 0


def test_compiled_code_stays_compiled():
    calls = []

    def backend(graph, inputs):
        calls.append("compiled")
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    with StorageTracker() as tracker:
        double(torch.ones(10))
    assert calls == ["compiled"]
    assert tracker.ledger.peak_bytes == 80


def test_pauses_take_no_time_and_hide_births():
    tracker = StorageTracker()
    for _ in range(2):
        tracker.start()
        tracker.start()
        x = torch.empty(10)
        tracker.stop()
        tracker.stop()
        before = tracker.ledger.now()
        y = torch.empty(1000)
        assert tracker.ledger.now() == before
    assert tracker.ledger.peak_bytes in (40, 80)
    del x, y
    tracker.close()


def test_closing_lets_go_of_every_storage():
    x = torch.ones(10)
    tracker = StorageTracker()
    tracker.track([x], "parameters")
    tracker.close()
    del x
    assert tracker.ledger.live_bytes == 40


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="rounding=0"):
        StorageTracker(rounding=0)
    with StorageTracker() as tracker, pytest.raises(RuntimeError, match="is on already"):
        tracker.__enter__()
