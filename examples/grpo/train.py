"""GRPO and DAPO on `vllm-rollout serve`: one update per step, and on policy, except with --feed and --resume.

    python -m examples.grpo.pretrain models                                   # models/careful, some five minutes
    python -m examples.grpo.train models/careful runs/race --race --serve     # 25 steps

OUTPUT gets `record.jsonl` (a line per step and per evaluation), `checkpoint.pt` and `weights`. After a kill at any
moment, the same command continues the training. docs/guides/training.md lists flags, and explains servers by hand.
"""

import argparse
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch

from examples.grpo.loss import ALGORITHMS, CORRECTIONS, Update, rows_of
from examples.grpo.model import load, prompt_ids, write_line
from examples.grpo.server import PRUNING, Server, feed_fields, nccl_sender, rollout_fields, run_fields, sampling
from examples.grpo.task import TASKS, VOCABULARY, Problem, describe, mean, problems
from vllm_rollout import RolloutError
from vllm_rollout.answers import GroupAnswer, GroupStream
from vllm_rollout.integrations.served import check_served
from vllm_rollout.process import exit_on_sigterm
from vllm_rollout.training.stream import StepResult, StreamTrainer
from vllm_rollout.training.weights import check_finite, save_weights

CLIP_NORM, WARMUP_STEPS = 1.0, 5  # Adam's first steps are all sign
MOST_IDLE_STEPS, MOST_ASKS = 10, 4  # steps in a row without a gradient, then an error; requests in a step of DAPO
LOOK_S = 30.0  # for a batch of a feed: then the trainer looks whether the server lacks its weights
LARGEST_DIFFERENCE = 0.1  # mean distance of log probabilities, in nats: from there on the server has other weights
STARTING = (412, 502, 503, 504)  # it was started anew and has other weights, it starts, or a proxy does not find it
NOT_TERMS = {"output", "url", "serve", "serve_flags", "steps", "evaluate_every", "held_out", "patience"}  # may change
NOT_TERMS |= {"lr", "micro_tokens", "nccl"}
NEEDS = (("resume", "rounds"), ("speculation", "rounds"), ("max_staleness", "feed"), ("serve_flags", "serve"))
NOT_WITH = (("feed", "rounds"), ("feed", "stream"), ("feed", "audit_ratio"), ("nccl", "serve"), ("nccl", "lora"))
LEAST = {"prompts": 1, "max_tokens": 1, "evaluate_every": 1, "held_out": 1, "max_staleness": 0}


@dataclasses.dataclass(slots=True)
class Progress:
    """State of a training besides weights, optimizer and random numbers. The counters are of completed steps."""

    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(3))  # in the names of its weights
    step: int = 0
    num_prompts: int = 0
    first_problem: int = 0  # of the present feed
    seconds: float = 0.0  # of steps that succeeded, each with the transfer of its weights before it
    num_idle: int = 0  # steps in a row without a gradient
    run: str | None = None  # of rounds
    learned: bytes = b""  # the server's state: lengths, scores and runs, if they matter
    record_size: int = 0  # in bytes: later lines of the record belong to a step that is repeated


@dataclasses.dataclass(slots=True)
class Step:
    groups: list[GroupAnswer] = dataclasses.field(default_factory=list)
    filtered: list[GroupAnswer] = dataclasses.field(default_factory=list)
    usage: Counter[str] = dataclasses.field(default_factory=Counter)
    warnings: list[str] = dataclasses.field(default_factory=list)
    num_prompts: int = 0
    staleness: list[int] = dataclasses.field(default_factory=list)  # of groups of a feed
    ess_share: float | None = None
    differences: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(1))
    result: StepResult | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)


class Training:
    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        torch.manual_seed(args.seed)
        self.args, self.server = args, server
        self.said = {name: str(value) for name, value in vars(args).items()}
        self.model, self.tokenizer = load(args.model, args.lora)
        self.learned = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        words = " ".join([problems(args.task, "look", 1)[0].text, *VOCABULARY])
        check_served(server.client, self.model.config, self.tokenizer, words)
        self.optimizer = torch.optim.AdamW(self.learned.values(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.trainer = StreamTrainer(self.learned.values(), self.optimizer, max_norm=CLIP_NORM)
        self.terms = dataclasses.replace(ALGORITHMS[args.algorithm], correction=CORRECTIONS[args.correct])
        self.filters = args.algorithm == "dapo"
        self.progress, self.run, self.feed, self.version, self.sync_s = Progress(), None, None, None, 0.0
        self.checkpoint, self.record = args.output / "checkpoint.pt", args.output / "record.jsonl"

    def go(self) -> None:
        self.restore()
        write_line(self.record, {"kind": "start", **self.said})
        self.persist(self.prepare_server)
        self.save()  # the names of its feed and its weights
        while self.progress.step < self.args.steps:
            if self.progress.step % self.args.evaluate_every == 0:
                self.persist(self.evaluate)
            self.say(self.persist(self.roll_out_and_learn))
            self.save()  # before the server gets the weights: a feed's never go back, which would make groups too old
            self.persist(self.give_weights)
        self.persist(self.evaluate)
        if self.feed:
            with suppress(RolloutError):  # the server was lost, and the feed with it
                self.feed.delete()

    def roll_out_and_learn(self) -> Step:
        """Run a step, except for sending its weights to the server. The step can be repeated until its last lines."""
        step, streamed_s, began = Step(), 0.0, time.perf_counter()
        update = Update(self.trainer, self.model, self.terms, self.args.micro_tokens)
        for group in self.from_feed(step) if self.feed else self.groups(step):
            step.groups.append(group)
            if self.args.stream:
                streamed_s -= time.perf_counter()
                update.add([group])
                streamed_s += time.perf_counter()
        learned = self.learned_by_server()  # before the update: a server that is lost here loses the step, too
        rolled_out = time.perf_counter()
        step.groups.sort(key=lambda group: (len(group.prompt_id), group.prompt_id))  # not as they ended
        update.add([] if self.args.stream else step.groups)
        step.differences, step.ess_share = torch.cat(update.differences), update.ess_share
        versions = {span["version"] for g in step.groups for t in g.trajectories for span in t.weight_versions}
        others, difference = versions - {self.version}, step.differences.mean().item()
        if not (self.args.resume or self.feed) and (others or difference > LARGEST_DIFFERENCE):
            what = f"it sampled with {others or 'them'}, {difference:.2g} nats from the policy on average"
            raise RuntimeError(f"the server has other weights: {what}. Does somebody else give it some?")
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.args.lr * min(1, (self.progress.step + 1) / WARMUP_STEPS)
        step.result = update.finish()
        step.seconds = {"rollout": rolled_out - began, "training": time.perf_counter() - rolled_out + streamed_s}
        step.seconds |= {"sync": self.sync_s, "step": self.sync_s + time.perf_counter() - began}
        self.progress.seconds += step.seconds["step"]
        self.progress.step += 1
        self.progress.learned = learned
        self.progress.num_prompts += step.num_prompts
        self.progress.num_idle = 0 if step.result else self.progress.num_idle + 1
        return step

    def groups(self, step: Step) -> Iterator[GroupAnswer]:
        """The step's groups as they end. With DAPO, only groups with a gradient."""
        args, progress, num_wanted = self.args, self.progress, self.args.prompts
        size, fields = rollout_fields(args)

        def draw(count: int) -> list[dict[str, Any]]:
            step.num_prompts += count
            first = progress.num_prompts + step.num_prompts - count
            return [self.asked(problem) for problem in problems(args.task, f"train-{args.seed}", count, first)]

        for _ in range(MOST_ASKS if self.filters and not self.run else 1):
            if self.run is not None:
                now = self.run.refresh()
                fresh = draw(now.num_fresh_prompts) if now.next_round == "short" else []
                reserve = draw(args.prompts) if self.filters else []
                events = self.run.stream(fresh, key=f"step-{progress.step}", reserve=reserve)
            else:
                events = self.server.client.stream(draw(num_wanted), size, **fields)
            stream = GroupStream(events)
            for group in stream:
                if not self.filters or rows_of(group, self.terms)[0]:
                    num_wanted -= 1
                    yield group
                else:
                    step.filtered.append(group)
            assert stream.summary is not None  # or the stream had raised
            step.usage.update({name: count for name, count in stream.summary.usage if count})
            step.warnings += stream.summary.warnings
            if not num_wanted:
                return

    def from_feed(self, step: Step) -> Iterator[GroupAnswer]:
        """The feed's next batch. Raises: RolloutError, 412 if a server that was started anew lacks the weights."""
        args, progress, until, batch = self.args, self.progress, time.monotonic() + self.args.patience, None
        num_wanted = args.prompts * (args.max_staleness + 2) * (MOST_ASKS if self.filters else 1)
        while batch is None:
            now = self.feed.refresh()  # it counts the prompts that it got, so a repeated step puts none twice
            missing = num_wanted - now.num_waiting - now.num_running - now.num_complete
            fresh = problems(args.task, f"train-{args.seed}", missing, progress.first_problem + now.totals.num_put)
            now = self.feed.put(self.asked(problem) for problem in fresh)
            step.num_prompts = progress.first_problem + now.totals.num_put - progress.num_prompts
            try:
                batch = self.feed.batch(key=f"step-{progress.step}", timeout_s=LOOK_S, reconnect_s=0)
            except RolloutError as error:
                if error.type == "GatewayTimeout" and "has started anew" in error.message:  # and lacks the weights
                    raise RolloutError(412, error.message, "PreconditionFailed") from error
                if error.type != "GatewayTimeout" or time.monotonic() > until:
                    raise
        step.staleness = [group.staleness for group in batch.groups]
        step.warnings += batch.warnings
        step.usage.update({"num_dropped": len(batch.dropped), "num_filtered": len(batch.filtered)})
        yield from batch.groups

    def asked(self, problem: Problem) -> dict[str, Any]:
        return {"id": problem.id, "prompt_token_ids": prompt_ids(self.tokenizer, problem), "data": problem.data}

    def evaluate(self) -> None:
        """Evaluate on held-out problems without stopping a candidate. Raises: RuntimeError if no answer is graded."""
        args, began = self.args, time.perf_counter()
        held_out = {problem.id: problem for problem in problems(args.task, "held-out", args.held_out)}
        asked = [self.asked(problem) for problem in held_out.values()]
        answer = self.server.client.rollout(
            asked, 2, reward=args.task, sampling_params=sampling(args, 7), include=["text", "logprobs"]
        )
        graded = [(g.prompt_id, t) for g in answer.groups for t in g.trajectories if t.reward is not None]
        if not graded:
            why = "; ".join([*answer.warnings, *filter(None, [answer.groups[0].reason])][:2])
            raise RuntimeError(f"no answer to a held-out problem has a reward: {why}. Look at the server and its log.")
        line = {"kind": "evaluation", "step": self.progress.step, "seconds_of_steps": self.progress.seconds}
        line |= describe([(held_out[id], t.num_tokens, t.reward) for id, t in graded])
        line["seconds"] = time.perf_counter() - began
        shown = [(held_out[g.prompt_id].text, t) for g in answer.groups[:8] for t in g.trajectories[:1]]
        write_line(self.record, {**line, "answers": [[asked, t.text, t.num_tokens, t.reward] for asked, t in shown]})
        print("held out after step {step}: success {success:.3f}, length {length:.1f}".format(**line), flush=True)
        for warning in answer.warnings[:5]:
            print(f"  warning: {warning}", flush=True)

    def persist(self, work: Callable[[], Any], attempts: int = 5) -> Any:
        """Run `work` again if the server was lost meanwhile. `Update` drops the gradients of the lost attempt."""
        try:
            return work()
        except RolloutError as error:
            forgotten = (self.run or self.feed) and error.status == 404  # by one that was started anew
            lost = forgotten or error.status in (None, *STARTING) or not self.server.client.health()
            if not attempts or not lost or error.type in ("UnexpectedAnswer", "GatewayTimeout"):
                raise
            print(f"the server was lost ({error}); waiting until it is back", flush=True)
        self.server.bring_back()
        self.persist(self.prepare_server, attempts - 1)
        return self.persist(work, attempts - 1)

    def prepare_server(self) -> None:
        """Give the server the current weights, the state it had learned, and the run."""
        self.send = nccl_sender(self.model, self.server.client.base_url) if self.args.nccl else None
        self.give_weights()
        if self.progress.learned:
            self.server.client.set_state(self.progress.learned)
        if self.args.rounds:
            shape = self.args.group_size, self.args.prompts
            self.run = self.server.client.run(*shape, id=self.progress.run, **run_fields(self.args))
            self.progress.run = self.run.id
        if self.args.feed:
            id = f"{self.args.output.name}-{self.progress.id}"
            self.feed = self.server.client.feed(id=id, **feed_fields(self.args))
            if not self.feed.info.totals.num_put:  # it is new
                self.progress.first_problem = self.progress.num_prompts
                self.save(self.progress.record_size)  # before it gets a prompt, and perhaps amid a step
        self.progress.learned = self.progress.learned or self.learned_by_server()

    def learned_by_server(self) -> bytes:
        """The server's state (lengths, scores, runs) if the flags use it, to be restored when a step is repeated."""
        matters = self.args.prune or self.args.rounds or self.args.redundancy == "auto"
        return self.server.client.state() if matters else b""

    def give_weights(self) -> None:
        check_finite(self.model, f"after {self.progress.step} steps")
        began = time.perf_counter()
        weights = self.send or save_weights(self.model, self.args.output / "weights")
        version = f"{self.args.output.name}-{self.progress.id}-{self.progress.step}"
        kv = "keep" if self.args.feed else "recompute"
        self.version = self.server.client.give_weights(weights, version, kv).version
        self.sync_s = time.perf_counter() - began

    def save(self, record_size: int | None = None) -> None:
        """Write the checkpoint, one file, whole and of one step. Raises: ValueError for weights that are not finite."""
        check_finite(self.model, f"after {self.progress.step} steps")
        self.progress.record_size = self.record.stat().st_size if record_size is None else record_size
        content = {"weights": self.learned, "optimizer": self.optimizer.state_dict()}
        content |= {"random": torch.get_rng_state(), "progress": dataclasses.asdict(self.progress)}
        torch.save({**content, "terms": self.said}, new := self.args.output / "checkpoint.new")
        new.replace(self.checkpoint)

    def restore(self) -> None:
        """Continue from the checkpoint if there is one. Raises: RuntimeError if it was made with other flags."""
        if not self.checkpoint.exists():
            self.record.unlink(missing_ok=True)
            return
        saved = torch.load(self.checkpoint, weights_only=False)
        other = dict(saved["terms"].items() - self.said.items())
        if terms := {name: value for name, value in other.items() if name not in NOT_TERMS}:
            raise RuntimeError(f"{self.checkpoint} was made with {terms}. Say the same, or another output.")
        self.model.load_state_dict(saved["weights"], strict=False)
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        self.progress = Progress(**saved["progress"])
        with self.record.open("r+b") as file:
            file.truncate(self.progress.record_size)
        print(f"goes on after step {self.progress.step}", flush=True)

    def say(self, step: Step) -> None:
        """Write and print the step's results. Raises: RuntimeError after MOST_IDLE_STEPS steps without a gradient."""
        groups, result = step.groups + step.filtered, step.result
        ended = [trajectory for group in groups for trajectory in group.trajectories]
        stopped = [other.num_tokens for group in groups for other in group.candidates]
        lengths, rewards = [t.num_tokens for t in ended], [t.reward for t in ended]
        line = {"kind": "step", "step": self.progress.step - 1, "groups": len(step.groups), "usage": step.usage}
        line |= {"reward": mean([r for r in rewards if r is not None]) or 0.0, "length": mean(lengths) or 0.0}
        line |= {"longest": max([*lengths, *stopped], default=0), "filtered": len(step.filtered)}
        line |= {"teaching": sum(bool(rows_of(group, self.terms)[0]) for group in step.groups)}
        norm, weight = (result.gradient_norm, result.weight) if result else (0.0, 0.0)
        line |= {"gradient_norm": norm, "learned_from": weight, "resumed": [t.num_resumed_tokens for t in ended]}
        line |= {"difference_mean": step.differences.mean().item(), "difference_max": step.differences.max().item()}
        line |= {"seconds": {**step.seconds, "rewards": sum(t.reward_s or 0.0 for t in ended)}}
        line |= {"lengths": lengths, "rewards": rewards, "other_lengths": stopped}
        line |= {"staleness": step.staleness, "ess_share": step.ess_share} if self.feed else {}
        write_line(self.record, line)
        took = " ".join(f"{name} {value:.2f}" for name, value in step.seconds.items())
        said = f"reward {line['reward']:.3f}, length {line['length']:.0f}, {line['teaching']} groups teach, {took} s"
        print(f"step {line['step']}: {said}", flush=True)
        step.warnings += [f"{g.prompt_id} is incomplete: {g.reason}" for g in step.groups if g.status == "incomplete"]
        if result is None:
            step.warnings.append(f"nothing taught: rewards are all the same in each group, {line['reward']:.3f}")
        for warning in sorted(set(step.warnings))[:5]:
            print(f"  warning: {warning}", flush=True)
        if self.progress.num_idle >= MOST_IDLE_STEPS:
            raise RuntimeError(f"for {MOST_IDLE_STEPS} steps {step.warnings[-1]}. Look at the rewards.")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="the folder of a model, from `pretrain` or Hugging Face")
    add("output", type=Path, help="a folder. A training in it is continued")
    add("--serve", action="store_true", help="start a server, and end it at the end")
    add("--serve-flags", help="more flags of `vllm-rollout serve` for --serve, quoted as for a shell")
    add("--url", default="http://127.0.0.1:8000", help="URL of a running server. Default: %(default)s")
    add("--nccl", action="store_true", help="send weights to a server on other GPUs by NCCL, not by disk")
    add("--patience", type=float, default=600, help="seconds to wait for a server or a batch. Default: %(default)s")
    add("--task", choices=TASKS, default="chain", help="digit_sum is for chat models. Default: %(default)s")
    add = parser.add_argument_group("learning").add_argument
    add("--algorithm", choices=ALGORITHMS, default="grpo", help="Default: %(default)s")
    add("--steps", type=int, default=25, help="updates of the weights. Default: %(default)s")
    add("--seed", type=int, default=1, help="seed of problems, with --seeded of answers too. Default: %(default)s")
    add("--seeded", action="store_true", help="sample answers with seeds, so that a run can be repeated")
    add("--prompts", type=int, default=16, help="groups per step. Default: %(default)s")
    add("--group-size", type=int, default=8, help="answers returned per group. Default: %(default)s")
    add("--max-tokens", type=int, default=512, help="length cap of an answer. Default: %(default)s")
    add("--lr", type=float, default=3e-4, help="learning rate. Default: %(default)s")
    add("--lora", type=int, default=0, metavar="RANK", help="only LoRA matrices (pip install peft). Default: none")
    add("--micro-tokens", type=int, default=4096, help="per forward pass: fewer need less memory. Default: %(default)s")
    add("--evaluate-every", type=int, default=5, metavar="STEPS", help="Default: %(default)s")
    add("--held-out", type=int, default=256, help="problems per evaluation, two answers each. Default: %(default)s")
    add = parser.add_argument_group("what the server is asked for: one flag per feature").add_argument
    add("--race", action="store_true", help="as many spare candidates as --group-size: the first to finish count")
    add("--redundancy", help="spare candidates, or auto. Default: 0, with --race or --dual-end the group size")
    add("--dual-end", type=float, nargs="?", const=1.5, metavar="PATIENCE", help="the shortest answers and the longest")
    add("--prune", nargs="?", const="gradient", choices=PRUNING, help="twice as many, half are stopped. shadow: none")
    add("--detection-length", type=int, default=24, help="tokens after which --prune judges. Default: %(default)s")
    add("--rounds", action="store_true", help="short rounds, and a long one for prompts that took too long")
    add("--speculation", type=float, default=1.25, help="of --rounds, for prompts and answers. Default: %(default)s")
    add("--resume", action="store_true", help="long rounds of --rounds continue the answers that exist")
    add("--feed", action="store_true", help="asynchronous, by a feed. Not with --rounds, --stream, --audit-ratio")
    add("--max-staleness", type=int, default=1, help="of --feed: most updates to a group's batch. Default: %(default)s")
    add("--correct", choices=CORRECTIONS, default="clip", help="tokens of older weights. Default: %(default)s")
    add("--stopped-teach", action="store_true", help="train on stopped candidates as wrong answers, or by score")
    add("--audit-ratio", type=float, help="share of groups in which no candidate is stopped. Default: 0")
    add("--stream", action="store_true", help="compute a group's gradient as soon as the group ends")
    args = parser.parse_args(words)
    given = {flag for flag, value in vars(args).items() if value != parser.get_default(flag)}
    spare = "auto" if args.redundancy is None else args.redundancy
    args.redundancy = int(spare) if spare.isdecimal() else args.redundancy
    least = {**LEAST, "group_size": 1 + (args.algorithm == "dapo" and (args.feed or args.rounds))}  # rewards differ
    wrong = [f"--{flag} must be at least {n}, got {had}" for flag, n in least.items() if (had := vars(args)[flag]) < n]
    wrong += [f"--redundancy must be a number from 0, or auto, got {spare!r}"] * (spare == args.redundancy != "auto")
    wrong += [f"--{flag} needs --{other}" for flag, other in NEEDS if flag in given and other not in given]
    wrong += [f"--{flag} does not go with --{other}" for flag, other in NOT_WITH if {flag, other} <= given]
    if args.feed and "allow_fewer" in rollout_fields(args)[1].get("pruning", {}):
        wrong.append("--feed returns whole groups: --prune needs spare candidates of --race or --redundancy")
    if wrong:
        parser.error("; ".join(wrong).replace("_", "-"))
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # more threads are slower on a busy machine
    args.output.mkdir(parents=True, exist_ok=True)
    exit_on_sigterm()
    with closing(Server(args)) as server:
        server.bring_back()
        Training(args, server).go()


if __name__ == "__main__":
    main()
