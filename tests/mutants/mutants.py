"""The mutants: where the source is broken, how, and which tests are to notice.

The tests of a mutant are kept few, so that the whole list runs in minutes; each is a test of the suite.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file` (below src/thinwire) and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LAWS = "tests/laws/test_laws.py"
TORCHFT = "tests/hosts/test_torchft_groups.py"

MUTANTS = (
    Mutant(
        "a lane does not wait for the bucket",
        "drivers/lanes.py",
        "                on.wait(stream, ready)\n",
        "",
        ("tests/devices/test_streams.py",),
    ),
    Mutant(
        "a future is completed on any stream",
        "drivers/lanes.py",
        "            with scope():\n                done(error)\n",
        "            done(error)\n",
        ("tests/devices/test_streams.py",),
    ),
    Mutant(
        "a staging buffer is used again too early",
        "net/staging.py",
        "            self._streams.wait_on_host(buffer.until)\n",
        "",
        ("tests/devices/test_streams.py",),
    ),
    Mutant(
        "words of a device's frame may change places",
        "net/device_sums.py",
        "_mixed(words + keys)",
        "_mixed(words)",
        ("tests/devices/test_frames.py",),
    ),
    Mutant(
        "a kernel mixes in a tensor of the CPU",
        "kernels/reference/quantisation.py",
        "torch.zeros_like(inverse)",
        "torch.zeros(1)",
        ("tests/devices/test_kernels.py", "-k", "quantise"),
    ),
    Mutant(
        "a resumed run counts from zero",
        "core/engine.py",
        "        self.meter.load(counters)\n",
        "",
        ("tests/hosts/test_metrics.py",),
    ),
    Mutant(
        "groups of replicas share their keys in a checkpoint",
        "sessions/rank_keys.py",
        ' + (f" (group of rank {first})" if first else "")',
        "",
        ("tests/integrations/test_dcp.py", "-k", "groups"),
    ),
    Mutant(
        "a replica that has drifted is not saved",
        "integrations/rank_states.py",
        '            found["model"] = checkpoint_file.copied(self._model.state_dict(), "model")\n',
        "",
        ("tests/integrations/test_accelerate.py",),
    ),
    Mutant(
        "topk drops what its code lost",
        "methods/families/feedback.py",
        "            self._error[where] += amount\n",
        "            pass\n",
        (LAWS, "-k", "test_conservation and topk and split"),
    ),
    Mutant(
        "demo drops what its code lost",
        "methods/families/cosine.py",
        "            room[where] -= amount\n",
        "            pass\n",
        (LAWS, "-k", "test_conservation and demo"),
    ),
    Mutant(
        "the second code of two shots is not rotated back",
        "methods/families/quantised.py",
        "        self.codec.turn_back(decoded, self.rotation - 1 - owner)\n",
        "",
        ("tests/methods/test_rotate.py", "-k", "two_large_entries"),
    ),
    Mutant(
        "an aborted step keeps its error",
        "methods/families/feedback.py",
        "            self._error.copy_(self._out)\n",
        "            pass\n",
        (LAWS, "-k", "test_non_finite_input_leaves_no_trace and topk"),
    ),
    Mutant(
        "topk never commits",
        "methods/topk.py",
        "if await ch.commit(mean.finite):",
        "if await ch.commit(mean.finite) and ch.step < 0:",
        (LAWS, "-k", "test_conservation and topk"),
    ),
    Mutant(
        "powersgd swaps a sign in its error",
        "methods/powersgd.py",
        "alpha=-1",
        "alpha=1",
        (LAWS, "-k", "test_conservation and powersgd"),
    ),
    Mutant(
        "powersgd forgets its factor",
        "methods/powersgd.py",
        "                q.copy_(Q)\n",
        "                pass\n",
        ("tests/methods/test_powersgd.py",),
    ),
    Mutant(
        "scalecom has the same leader always",
        "methods/scalecom.py",
        "ch.step % ch.size",
        "0 * ch.step",
        ("tests/methods/test_scalecom.py",),
    ),
    Mutant(
        "scalecom's filter leaves out beta",
        "methods/scalecom.py",
        "m.add_(x, alpha=self.beta)",
        "m.add_(x)",
        ("tests/methods/test_scalecom.py",),
    ),
    Mutant(
        "two shots lose the second code's error",
        "methods/families/quantised.py",
        "lost * len(self.stretches)",
        "lost * 0",
        (LAWS, "-k", "test_conservation and (efsign or onebit)"),
    ),
    Mutant(
        "signs with buckets lose the second code's error",
        "methods/families/sign_feedback.py",
        "kernels.lost_by_signs(reduced, again[1], self.bucket, ch.size, self.error[mine])",
        "self.error[mine] = 0.0",
        ("tests/methods/test_efsign.py", "-k", "few_passes or bucket_has_a_magnitude"),
    ),
    Mutant(
        "adam adds to its squares before the commit",
        "methods/families/mean_squares.py",
        "        if not renewal.is_due(ch.step):\n            return Noted(own)\n",
        "        self.own = own\n        if not renewal.is_due(ch.step):\n            return Noted(own)\n",
        (LAWS, "-k", "test_non_finite_input_leaves_no_trace and adam"),
    ),
    Mutant(
        "the index code is one bit short",
        "methods/families/indices.py",
        "(n // k).bit_length() - 1",
        "(n // k).bit_length() - 2",
        (
            "tests/docs/test_formulas.py",
            "tests/kernels/test_kernel_indices.py",
            LAWS,
            "-k",
            "topk or indices",
        ),
    ),
    Mutant(
        "momentum is not masked where dgc sends",
        "methods/dgc.py",
        "masked(state.m, m, c.indices)",
        "state.m.copy_(m) if self.momentum else None",
        ("tests/methods/test_dgc.py",),
    ),
    Mutant(
        "lag skips one step too long",
        "methods/families/lazy_rules.py",
        "silence >= max_skip",
        "silence > max_skip",
        ("tests/methods/test_lag.py", "-k", "silent"),
    ),
    Mutant(
        "lag's bound ignores the learning rate",
        "methods/families/lazy_rules.py",
        "xi / rate**2 * squared_steps",
        "xi * squared_steps",
        ("tests/methods/test_lag.py", "-k", "learning_rate"),
    ),
    Mutant(
        "a frame is eight bytes too short",
        "net/frames.py",
        "return -(-count // 8) * 8",
        "return -(-count // 8) * 8 - 8 * (count > 64)",
        ("tests/net/test_frames.py",),
    ),
    Mutant(
        "the step in a frame is not checked",
        "net/frames.py",
        "if its_step != step % _LIMIT:",
        "if False:",
        ("tests/net/test_frames.py",),
    ),
    Mutant(
        "a mean is divided by one rank too many",
        "core/channel.py",
        "        requests = list(means.values())\n        weight = 1.0 / self.rank_info.size\n",
        "        requests = list(means.values())\n        weight = 1.0 / (self.rank_info.size + 1)\n",
        (LAWS, "-k", "test_exact_configuration and dense"),
    ),
    Mutant(
        "every rank draws the same private numbers",
        "core/channel.py",
        'self._hash(f"rank {self.rank}")',
        'self._hash("rank")',
        ("tests/core/test_channel.py",),
    ),
    Mutant(
        "numbers are drawn alike in every step",
        "core/channel.py",
        "{self._seed}\\n{self.step}\\n",
        "{self._seed}\\n",
        ("tests/core/test_channel.py", LAWS, "-k", "random or unbiased"),
    ),
    Mutant(
        "the seed does not matter",
        "core/channel.py",
        "{self._seed}\\n{self.step}\\n",
        "{self.step}\\n",
        (LAWS, "-k", "test_purity"),
    ),
    Mutant(
        "a step with a bad number counts",
        "core/engine.py",
        "if committed and self.remembers:",
        "if self.remembers:",
        (LAWS, "-k", "test_non_finite_input_leaves_no_trace"),
    ),
    Mutant(
        "residuals do not follow the loss scale",
        "core/state.py",
        "            for tensor in live.state.coordinates().values():\n                tensor.mul_(factor)\n",
        "            pass\n",
        ("tests/core/test_states.py",),
    ),
    Mutant(
        "a cycle is one step too long",
        "averaging/clock.py",
        "ends = offset >= steps",
        "ends = offset > steps",
        ("tests/averaging/test_periodic.py", "-k", "when_replicas"),
    ),
    Mutant(
        "the outer step goes the wrong way",
        "averaging/base.py",
        "anchor.sub_(mean, alpha=self.lr)",
        "anchor.add_(mean, alpha=self.lr)",
        ("tests/averaging/test_periodic.py", "-k", "diloco or blend"),
    ),
    Mutant(
        "an old rank's residual counts in full",
        "sessions/checkpoint.py",
        "_sum(found, new_size / old_size)",
        "_sum(found, 1.0)",
        ("tests/failures/test_checkpoints.py",),
    ),
    Mutant(
        "a checkpoint of another step is loaded",
        "sessions/checkpoint.py",
        'schema.same(states, ("step", "size", "scale"))',
        'schema.same(states, ("size", "scale"))',
        ("tests/failures/test_checkpoints.py",),
    ),
    Mutant(
        "bytes received are counted as sent",
        "net/executor.py",
        "cost.sent, cost.received, seconds",
        "cost.received, cost.received, seconds",
        ("tests/core/test_channel.py", "tests/net/test_meter.py", "tests/net/test_costs.py"),
    ),
    Mutant(
        "a repeated message is authentic",
        "net/secret.py",
        "        self._count += 1\n",
        "",
        ("tests/net/test_secret.py", "-k", "repeated"),
    ),
    Mutant(
        "the proof of one side holds for the other",
        "net/secret.py",
        'self._secret.proves(proof, f"side {1 - self._side}"',
        'self._secret.proves(proof, f"side {self._side}"',
        ("tests/net/test_secret.py", "-k", "proof or prove"),
    ),
    Mutant(
        "a sealed message is not checked",
        "server/messages.py",
        "            self._receiving.check(buffer[:end].data, tag.data, self.connection.peer)\n",
        "",
        ("tests/server/test_secret.py", "-k", "changed or repeated"),
    ),
    Mutant(
        "a rejected update is applied",
        "server/server.py",
        "            self._reject(peer.index)\n            return\n",
        "            self._reject(peer.index)\n",
        ("tests/server/test_runs.py", "-k", "poisoned"),
    ),
    Mutant(
        "accelerated AsyLPG without momentum",
        "server/options.py",
        "return max(2.0 / (epoch + 2.0), self.theta_floor)",
        "return 1.0",
        ("tests/server/test_trace.py", "-k", "momentum or theta"),
    ),
    Mutant(
        "residuals keep their size when a group leaves",
        "hosts/replica_groups.py",
        "            self._engine.states.rescale(group.size() / self._size)\n",
        "            pass\n",
        (TORCHFT, "-k", "residuals_of_a_group_that_left"),
    ),
    Mutant(
        "a torchft step that was voted down changes residuals",
        "hosts/replica_groups.py",
        "finish(program, committed and request.finite)",
        "finish(program, request.finite)",
        (TORCHFT, "-k", "test_an_aborted_step"),
    ),
    Mutant(
        "the change of a late group is lost",
        "hosts/torchft.py",
        "block.write(block.anchor.to(change.device) - change)",
        "block.write(block.anchor)",
        (TORCHFT, "-k", "test_a_late_group"),
    ),
    Mutant(
        "an optimizer averages twice in a step",
        "optim/adamw.py",
        "        if not self._averaged:\n            self.average()\n",
        "        self.average()\n",
        ("tests/optim/test_adamw.py", "-k", "equals"),
    ),
    Mutant(
        "an optimizer forgets the state of its session",
        "optim/adamw.py",
        "            self.session.load_state_dict(session)\n",
        "            pass\n",
        ("tests/optim/test_adamw.py", "-k", "resumed"),
    ),
    Mutant(
        "given groups of hosts are not compared",
        "net/rank_info.py",
        " or any(groups[other] != members for other in members)",
        "",
        ("tests/methods/test_hierarchical.py", "-k", "share_out"),
    ),
    Mutant(
        "a method far behind dense with AdamW is recommended",
        "predict/evidence.py",
        "nats is not None and nats > language.CLOSE_ENOUGH",
        "False",
        ("tests/predict/test_plan.py", "-k", "our_own_measurement"),
    ),
    Mutant(
        "a delay hands out an aborted step",
        "core/delay.py",
        "            elif not ready.committed:\n                view.out.fill_(torch.nan)\n",
        "            elif not ready.committed:\n                view.out.zero_()\n",
        ("tests/methods/test_delayed.py", "-k", "aborted"),
    ),
    Mutant(
        "a delay leaves the means at the old loss scale",
        "core/delay.py",
        "            mean.mul_(factor)\n",
        "            pass\n",
        ("tests/hosts/test_delayed.py", "-k", "scaler"),
    ),
    Mutant(
        "a model that differs on one rank is not sent",
        "sessions/first_rank.py",
        ".any(2).any(0)",
        ".all(2).all(0)",
        ("tests/core/test_first_rank.py", "-k", "one_other_bit"),
    ),
    Mutant(
        "a worker alone may win",
        "tools/report/summary.py",
        "one.method == ALONE or ",
        "",
        ("tests/report/test_summary.py", "-k", "neither"),
    ),
)
