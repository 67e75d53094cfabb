"""`shardwright explain`, `compare` and `view`: look at plans. None of them needs the model.

The commands warn if a file predicts another step or memory than its plan's present prediction. They end with status 3
where a plan does not fit.
"""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping
from pathlib import Path

import click

from shardwright.cli import terminal
from shardwright.cli.options import (
    FILE_PATH,
    PATH,
    Number,
    examples,
    format_option,
    output_option,
    parse_changes,
    plan_argument,
)
from shardwright.cli.planfiles import facts_to_show, shown_of, status_of, status_said, target_beside
from shardwright.cli.status import FINDING
from shardwright.pcg.step.recompute import OFFLOAD, RECOMPUTE


@click.command(
    epilog=examples(
        "explain plan.json --depth 2",
        "explain plan.json --find h.3.mlp.c_fc.weight",
        "explain plan.json --formula",
        "explain plan.json --why-not fsdp -o why-not-fsdp.json",
        "explain plan.json --what-if nodes=2x,bandwidth=0.5x",
        "explain plan.json train.py:make --what-if batch=2x",
    )
)
@plan_argument
@click.argument("model", required=False, metavar="[FILE.py:FUNCTION]")
@click.option("--hf-config", type=FILE_PATH, help="The model as a transformers config.json; see --what-if.")
@click.option("--depth", type=click.IntRange(1), help="Levels of modules to show; by default what fits a page.")
@click.option("--find", "--param", "--op", "name", metavar="NAME",
              help="What becomes of one parameter, operator or module of the model.")  # fmt: skip
@click.option("--memory", is_flag=True, help="Only the memory: by category, and what is largest at the peak.")
@click.option("--why-not", "strategies", metavar="STRATEGY", multiple=True,
              help="What another way would take at its best: "
              "ddp, zero-1, zero-2, fsdp, hsdp, tp, cp, ulysses, ring.")  # fmt: skip
@click.option("--what-if", "changes", metavar="CHANGES", type=parse_changes,
              help="The plan if that were so: nodes, bandwidth, memory, flops, batch or seq, as nodes=2x,batch=128. "
              "Another batch or seq needs the model, as FILE.py:FUNCTION or --hf-config.")  # fmt: skip
@click.option(
    "--by-hand", is_flag=True, help="What to set in FSDP2 and in torchtitan for the best plan by hand that fits."
)
@click.option("--recompute", "recompute", is_flag=True,
              help="All that backward computes again, as `recompute=` and --recompute take it.")  # fmt: skip
@click.option("--offload", "away", is_flag=True,
              help="All that waits for backward on the host, as `offload=` and --offload take it.")  # fmt: skip
@click.option("--formula", is_flag=True, help="Closed forms of seconds and bytes in nodes, batch and hidden size.")
@output_option("Keep the answer of --why-not or --what-if here, for `view --answer`.")
@format_option
def explain(
    plan_file: Path,
    model: str | None,
    hf_config: Path | None,
    depth: int | None,
    name: str | None,
    memory: bool,
    strategies: tuple[str, ...],
    changes: Mapping[str, str] | None,
    by_hand: bool,
    recompute: bool,
    away: bool,
    formula: bool,
    output: Path | None,
    form: str,
) -> int:
    """Say in words and tables what a plan does.

    What each mesh axis splits, how weights are stored, what is communicated, memory by category, the comparison with
    data parallelism, ZeRO and tensor parallelism, and what stays whole and why. It fits the terminal: COLUMNS says how
    wide, where that is not known.

    --why-not and --what-if search again, which takes as long as planning.
    """
    questions = {
        "--find": name,
        "--memory": memory or None,
        "--by-hand": by_hand or None,
        "--recompute": recompute or None,
        "--offload": away or None,
        "--formula": formula or None,
        "--why-not": strategies or None,
        "--what-if": changes,
    }
    given_options = [option for option, given in questions.items() if given is not None]
    if len(given_options) > 1 or len(strategies) > 1:
        raise click.UsageError(
            f"{', '.join(list(questions)[:-1])} and --what-if are questions of their own; ask one at a time"
        )
    if given_options and depth is not None:
        raise click.UsageError(
            f"--depth is of the tree of modules, and {given_options[0]} prints none; leave one of them out"
        )
    strategy = next(iter(strategies), None)
    if (model or hf_config) and strategy is None and changes is None:
        raise click.UsageError("a model is for --why-not and --what-if; explain needs none")
    if strategy is not None or changes is not None:
        from shardwright.cli.asking import what_if, why_not
        from shardwright.reports.answer import Answer

        target = target_beside(plan_file, output, ".answer.json", "the answer") if output else None
        plan = facts_to_show(plan_file).plan
        answer = (
            what_if(plan, changes or {}, model, hf_config)
            if strategy is None
            else why_not(plan, strategy, model, hf_config)
        )
        if target:
            Answer.of(answer, plan).save(target)
            terminal.note(f"saved {target}; look at it with: shardwright view {plan_file} --answer {target}")
        terminal.show(answer, form)
        return 0
    if output is not None:
        raise click.UsageError("-o keeps an answer of --why-not or --what-if; explain prints everything else")
    if name is not None:
        from shardwright.reports.finding import FoundReport

        facts = facts_to_show(plan_file)
        terminal.show(FoundReport(facts.plan, name, facts), form)
        return status_of(facts.plan)
    if by_hand:
        from shardwright.reports.byhand import ByHandReport

        facts = facts_to_show(plan_file)
        terminal.show(ByHandReport(facts.plan), form)
        return status_of(facts.plan)
    if recompute or away:
        from shardwright.reports.running import text_of

        facts = facts_to_show(plan_file)
        click.echo(text_of(facts.plan, RECOMPUTE if recompute else OFFLOAD))
        return status_of(facts.plan)
    if formula:
        from shardwright.reports.formula import FormulaReport

        facts = facts_to_show(plan_file)
        terminal.show(FormulaReport(facts), form)
        return status_of(facts.plan)
    shown = shown_of(plan_file)
    terminal.show(shown.of_memory if memory else shown.at(depth), form)
    return status_said(shown.unfit)


@click.command(epilog=examples("compare plan.json other-plan.json", "compare new.json old.json --fail-if-slower 2"))
@click.argument("plan_files", metavar="PLAN.json...", nargs=-1, required=True, type=PATH)
@click.option("--fail-if-slower", "percent", type=Number(0), metavar="PERCENT",
              help="End with status 1 where the first plan is slower by more than that than another that fits: a plan "
              "of the same model, or, where one is given, what it was compared with.")  # fmt: skip
@format_option
def compare(plan_files: tuple[Path, ...], percent: float | None, form: str) -> int:
    """Show plans beside each other.

    One plan: beside the baselines and the best plans of other meshes. Several: beside each other.
    """
    from shardwright.reports.comparison import ComparisonReport, slower

    plans = {str(path): facts_to_show(path).plan for path in plan_files}
    too_slow = slower(plans, percent / 100) if percent is not None else ""
    terminal.show(ComparisonReport(plans), form)
    status = status_of(*plans.values())
    if too_slow:
        terminal.note(f"error: {too_slow}")
    return status or FINDING * bool(too_slow)


@click.command(
    epilog=examples(
        "view plan.json --output plan.html --open",
        "view plan.json --profile plan.profile.json",
        "view plan.json --answer why-not-fsdp.json",
    )
)
@plan_argument
@output_option("Write the page here; by default beside the plan.")
@click.option("--profile", "profile_file", type=FILE_PATH, help="What `shardwright profile` measured, to be shown too.")
@click.option("--answer", "answer_files", type=FILE_PATH, multiple=True,
              help="What `shardwright explain --why-not` or --what-if answered (-o); may be repeated.")  # fmt: skip
@click.option("--open", "open_it", is_flag=True, help="Open it in the browser.")
def view(
    plan_file: Path, output: Path | None, profile_file: Path | None, answer_files: tuple[Path, ...], open_it: bool
) -> int:
    """Write a plan as a page for the browser.

    One HTML file that needs no network: the folded tree of modules with layouts, times, communication and bytes.
    """
    from shardwright.reports.answer import Answer
    from shardwright.view.page import write_page

    target = target_beside(plan_file, output, ".html", "the page")
    shown, measured = shown_of(plan_file), None
    if profile_file is not None:
        from shardwright.reports.facts import PlanFacts
        from shardwright.reports.profile import Profile, ProfileReport
        from shardwright.search.plan import Plan

        measured = ProfileReport(PlanFacts(Plan.load(plan_file)), Profile.load(profile_file)).data()
    answers = [Answer.load(path) for path in answer_files]
    for answer in answers:
        answer.check(shown.facts)
    write_page(shown, target, measured, answers)
    click.echo(target)
    if open_it:
        webbrowser.open(target.resolve().as_uri())
    return status_said(shown.unfit)
