"""What ranks do with a tied weight that two stages hold under two names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tasks import checkpointer, equal, kinds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from wraps import WAYS, Fsdp2, Net, Trainer, fully, whole


def save_differing(run: str) -> None:
    """The last stage's weight and its moments have drifted, in their last elements."""
    trainer = WAYS["pipeline_two_names"]()
    trainer.step(0)
    if trainer.stage:
        weight = trainer.net.head.weight
        with torch.no_grad():
            for tensor in (weight, trainer.optimizer.state[weight]["exp_avg"]):
                tensor[-1, -1] += 1
    with checkpointer(run, trainer) as c:
        c.save(1).wait()


def load_differing(run: str, way: str) -> tuple[tuple[str, str], str, tuple[str, ...], str]:
    """What a restore raises, and a save after it; then the problems of one that is not strict, and
    what a save raises after that."""
    trainer = WAYS[way]()
    with checkpointer(run, trainer) as c:
        raised = kinds(c.restore)
        mixed, _ = kinds(lambda: c.save(2))
        problems = c.restore(strict=False).problems
        dist.barrier()
        at_last, _ = kinds(lambda: c.save(2).wait())
    return raised, mixed, problems.lines(), at_last


def load_apart(run: str) -> None:
    """Into stages that hold them apart as well: each gets what was its own."""
    trainer = WAYS["pipeline_two_names"]()
    with checkpointer(run, trainer) as c:
        assert not c.restore().problems
    weights: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(weights, (trainer.net.embed or trainer.net.head).weight.detach())
    apart = (weights[-1] - weights[0]).flatten()
    assert apart[:-1].abs().max() == 0
    assert apart[-1] > 0.9


class Untied(Fsdp2):
    """Sharded, with two parameters where others have a tied one, on the same ranks."""

    whole_head = False

    def wrap(self, net: Net) -> nn.Module:
        net.head.weight = nn.Parameter(net.embed.weight.detach().clone())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if self.whole_head:
            left = {net.scale, net.head.weight}
            fully_shard(net, mesh=mesh, ignored_params=left)
            return net
        return fully(net, mesh)


class HalfUntied(Untied):
    """One of the two is sharded, the other whole on every rank."""

    whole_head = True


def load_untied(run: str, *, trained: bool) -> None:
    """Both get the weight and the state of what was one, each in memory of its own."""
    trainer = Untied()
    if trained:
        trainer.step(7)
    with checkpointer(run, trainer) as c:
        c.restore()
    found, expected = trainer.full(), torch.load(f"{run}.pt")["then"]
    for key in ("step", "exp_avg", "exp_avg_sq"):
        expected[f"head.weight:{key}"] = expected[f"embed.weight:{key}"]
    equal(found, expected)
    state = trainer.optimizer.state
    one, other = state[trainer.net.embed.weight], state[trainer.net.head.weight]
    with torch.no_grad():
        for key, entry in one.items():
            entry.zero_()
            assert torch.equal(whole(other[key]), expected[f"head.weight:{key}"]), key


def load_half_untied(run: str) -> tuple[str, str]:
    with checkpointer(run, HalfUntied()) as c:
        return kinds(lambda: c.restore(only=["optimizer"]))


def without_state(trainer: Trainer) -> list[str]:
    """The parameters that have not been stepped."""
    state = trainer.optimizer.state
    return [name for name, p in trainer.net.named_parameters() if not state.get(p)]


def save_unstepped(run: str) -> None:
    """All parameters but two were stepped, one on each stage."""
    trainer = WAYS["pipeline_two_names"]()
    trainer.step(0)
    named = dict(trainer.net.named_parameters())
    trainer.optimizer.state.pop(named["gate" if trainer.stage else "up.bias"])
    with checkpointer(run, trainer) as c:
        c.save(1).wait()


def load_unstepped(run: str, way: str) -> None:
    trainer = WAYS[way]()
    trainer.step(0)
    assert not without_state(trainer)
    with checkpointer(run, trainer) as c:
        c.restore()
    mine = dict(trainer.net.named_parameters())
    assert without_state(trainer) == [name for name in ("gate", "up.bias") if name in mine]
