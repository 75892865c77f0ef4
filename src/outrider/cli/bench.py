"""`outrider bench` and its subcommands. What they measure is in the package `bench`; here it is asked for and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options as given

app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)

Quick = Annotated[bool, typer.Option("--quick", help="Fewer tokens and repeats.")]
AsJson = Annotated[bool, typer.Option("--json", help="One object per line.")]


@app.callback()
def compare(
    ctx: typer.Context,
    model: given.Model = given.DEFAULT,
    draft: Annotated[
        str | None, typer.Option(help="Ways to draft, with commas; auto is all of them at the engine's choice.")
    ] = None,
    width: Annotated[str, typer.Option(help="Widths, with commas; auto is the engine's choice.")] = "auto",
    tree: Annotated[str | None, typer.Option(help="Trees of so many tokens, with commas.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `category` and `turns`, instead of our own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each kind.", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    batch: Annotated[int, typer.Option(help="Prompts answered together.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    peer: Annotated[list[str] | None, typer.Option(help="transformers or llama-cpp, beside ours; repeated.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to a file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into a file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as markdown.")] = False,
    threads: given.Threads = None,
) -> None:
    """Whether, how and how much speculation pays: every way to draft beside plain decoding, and beside peers.

    Ways take turns prompt by prompt; numbers are ratios to plain decoding of the same engine, with their spread.
    """
    if ctx.invoked_subcommand is not None:
        early = [name for name in ctx.params if _is_given(ctx, name)]
        if early:
            option = early[0].removesuffix("_file").replace("_", "-")
            raise typer.BadParameter(f"write it after {ctx.invoked_subcommand}", param_hint=f"--{option}")
        return
    from outrider.bench.compare_settings import CompareSettings, parse_trees, parse_widths
    from outrider.cli.bench_compare import show_comparison

    settings = CompareSettings(
        model=model,
        draft=draft,
        widths=parse_widths(width),
        trees=() if tree is None else parse_trees(tree),
        prompts=prompts,
        limit=limit,
        max_tokens=max_tokens,
        temperature=temperature,
        threads=threads,
        batch=batch,
        repeats=repeats,
        peers=tuple(peer or ()),
    )
    show_comparison(settings, json_file, plot, markdown)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command()
def engine(quick: Quick = False, as_json: AsJson = False) -> None:
    """What the engine itself costs per token, on mocks whose passes are nearly free."""
    from outrider.cli.benches import show_engine

    show_engine(quick, as_json)


@app.command()
def model(
    model: given.Model = given.DEFAULT, quick: Quick = False, as_json: AsJson = False, threads: given.Threads = None
) -> None:
    """Plain decoding and prefill beside transformers, and beside what the machine allows."""
    from outrider.cli.benches import show_model

    show_model(quick, as_json, model, threads)


@app.command()
def lookups(quick: Quick = False, as_json: AsJson = False) -> None:
    """What ngram and suffix cost at 8,000 tokens of context and 1,000,000 of past text."""
    from outrider.cli.benches import show_lookups

    show_lookups(quick, as_json)


@app.command()
def width(
    random: Annotated[int | None, typer.Option(help="Seed of random cells off the grid.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """The grid on which the engine's choice of width must never be slower, in virtual time."""
    from outrider.cli.benches import show_width

    show_width(quick, as_json, random)


@app.command()
def auto(
    model: given.Model = given.DEFAULT,
    draft: Annotated[str, typer.Option(help="Ways to draft, with commas.")] = "suffix,eagle",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `category` and `turns`, instead of our own.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 10,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 128,
    mixed: Annotated[bool, typer.Option("--mixed", help="Shuffle the kinds of work.")] = False,
    as_json: AsJson = False,
    threads: given.Threads = None,
) -> None:
    """The engine's choice of width beside plain decoding and fixed widths on a real model, by turns in one process."""
    from outrider.cli.benches import show_auto

    show_auto(as_json, model, draft, prompts, limit, max_tokens, mixed, threads)


@app.command()
def policies(
    trace: Annotated[Path | None, typer.Option(help="CSV of arrivals and lengths, instead of our own.")] = None,
    load: Annotated[float | None, typer.Option(help="Work that arrives over what can be done.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to write a picture (SVG).")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Waiting times of every policy on a trace of arrivals, in virtual time."""
    from outrider.cli.benches import show_policies

    show_policies(quick, as_json, trace, load, plot)


@app.command()
def ahead(
    model: Annotated[str | None, typer.Option(help="With --draft: a real pair; left out: mocks.")] = None,
    draft: Annotated[str | None, typer.Option(help="A draft model.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    threads: given.Threads = None,
) -> None:
    """What drafting while the target judges brings."""
    from outrider.cli.benches import show_ahead

    show_ahead(quick, as_json, model, draft, threads)


@app.command()
def batch(
    model: given.Model = given.DEFAULT, quick: Quick = False, as_json: AsJson = False, threads: given.Threads = None
) -> None:
    """Requests together beside one after another."""
    from outrider.cli.benches import show_batch

    show_batch(quick, as_json, model, threads)


@app.command()
def fresh(
    model: given.Model = given.DEFAULT,
    draft: Annotated[str | None, typer.Option(help="Ways to draft, with commas; what the model comes with.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `category` and `turns`, instead of our own.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    as_json: AsJson = False,
    threads: given.Threads = None,
) -> None:
    """What turning drafts on brings: each prompt once, by an engine with them and by one without, by turns."""
    from outrider.cli.benches import show_fresh

    show_fresh(as_json, model, draft, prompts, limit, max_tokens, temperature, threads)


@app.command()
def load(
    model: given.Model = "mock-cost",
    clients: Annotated[int | None, typer.Option(help="How many at once; 200.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="How long; 120.", min=1)] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Many clients at a server, some of which leave in the middle; every token is checked."""
    from outrider.cli.benches import show_load

    show_load(quick, as_json, model, clients, seconds)


@app.command()
def server(
    model: given.Model = "mock-cost",
    clients: Annotated[int | None, typer.Option(help="How many at once; 16.", min=1)] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """The same work through a server and without it."""
    from outrider.cli.benches import show_server

    show_server(quick, as_json, model, clients)


@app.command()
def kernels(
    model: given.Model = given.DEFAULT,
    rows: Annotated[str | None, typer.Option(help="Numbers of rows, with commas.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Tokens before them, with commas.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    plot: Annotated[Path | None, typer.Option(help="Where to write a picture.")] = None,
    as_json: AsJson = False,
    threads: given.Threads = None,
) -> None:
    """What a pass costs by its number of rows: the curve that decides whether drafting can pay."""
    from outrider.cli.bench_costs import show_kernels

    show_kernels(
        model,
        None if rows is None else given.numbers(rows, "--rows"),
        None if contexts is None else given.numbers(contexts, "--contexts"),
        repeats,
        plot,
        as_json,
        threads,
    )


@app.command()
def gpu(
    random: Annotated[
        str, typer.Option(help="The shape whose speed is measured, with random weights.")
    ] = "llama-3.1-8b",
    model: Annotated[
        str | None, typer.Option(help="A model that is checked, and measured as it speaks; left out: random weights.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Where to write a page with all of it.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """On a GPU: first whether everything is right, then how fast passes and plain decoding are beside its limits."""
    from outrider.cli.bench_gpu import show_gpu

    show_gpu(random, model, device, quick, as_json, out)


@app.command("gpu-rounds")
def gpu_rounds(
    random: Annotated[str, typer.Option(help="The shape of the target, which counts.")] = "llama-3.1-8b",
    draft: Annotated[
        str, typer.Option(help="The shape of the draft, which is right as often as told.")
    ] = "llama-3.2-1b",
    batches: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32,64,128,256",
    peer: Annotated[bool, typer.Option(help="transformers' continuous batching beside it.")] = True,
    device: Annotated[str, typer.Option(help="cuda or cuda:N")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Where to write a page with all of it.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """On a GPU: what speculation brings at a given acceptance, alone and under load, beside what costs let expect."""
    from outrider.cli.bench_gpu import show_rounds

    show_rounds(random, draft, device, given.numbers(batches, "--batches"), peer, quick, as_json, out)


@app.command()
def passes(
    model: given.Model = given.DEFAULT,
    peer: Annotated[list[str] | None, typer.Option(help="llama-cpp, beside ours.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to a file.")] = None,
    threads: given.Threads = None,
) -> None:
    """Passes of a few rows, plain decoding and prefill: ours, a peer's with the same file and threads, the limit."""
    from outrider.bench.passes import PassSettings
    from outrider.cli.bench_costs import show_passes

    show_passes(PassSettings(model=model, peers=tuple(peer or ()), threads=threads, repeats=repeats), json_file)


@app.command()
def simulate(
    acceptance: Annotated[float, typer.Option(help="How often a draft is right.", min=0, max=1)] = 0.7,
    draft_cost: Annotated[float, typer.Option(help="Of a drafted token, in one-row passes.", min=0)] = 0.05,
    curve: Annotated[str, typer.Option(help="Cost of a pass by rows: flat, compute, cpu, gpu.")] = "flat",
    widths: Annotated[str, typer.Option(help="With commas; auto is the engine's choice.")] = "auto,1,2,4,8",
    batches: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32",
    model: Annotated[
        str | None, typer.Option(help="Measure acceptance and costs of a model instead, and compare the ratios.")
    ] = None,
    draft: Annotated[str, typer.Option(help="With --model: drafts to compare, with commas.")] = "ngram,suffix",
    quick: Quick = False,
    as_json: AsJson = False,
    threads: given.Threads = None,
) -> None:
    """Predict what speculation brings from acceptance, costs and load; with --model beside what is measured."""
    from outrider.cli.bench_costs import show_comparison, show_simulation

    if model is None:
        show_simulation(acceptance, draft_cost, curve, widths, batches, as_json)
    else:
        chosen = [width for width in widths.split(",") if width.strip() != "auto"]
        show_comparison(
            model,
            draft,
            given.numbers(",".join(chosen), "--widths") if chosen else [],
            given.numbers(batches, "--batches"),
            quick,
            as_json,
            threads,
        )


@app.command()
def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: more of what `outrider serve` takes.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A server that runs already, of ours or any that speaks OpenAI's.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="What to load, or with --url what to ask for.")] = None,
    draft: given.Draft = None,
    clients: Annotated[str | None, typer.Option(help="So many at once, each asking again; 1,2,4 is a sweep.")] = None,
    rate: Annotated[str | None, typer.Option(help="Requests a second, at random times; with commas a sweep.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Arrivals and lengths of a CSV file.")] = None,
    speed: Annotated[str, typer.Option(help="Of the trace: 2 is twice as fast; with commas a sweep.")] = "1",
    requests: Annotated[int | None, typer.Option(help="How many.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="How long.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with `category` and `turns`.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="For --url.")] = None,
    ttft: Annotated[float, typer.Option(help="Promise: seconds to the first token.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Promise: seconds per token after it.")] = 0.1,
    compare: Annotated[bool, typer.Option(help="Plain decoding beside speculation.")] = True,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """A load of requests against a server: goodput, time to first token, time per token; plain against speculation."""
    from outrider.cli.bench_serve import show_serve

    show_serve(
        url=url,
        model=model,
        draft=draft,
        serve_arguments=arguments or (),
        clients=clients,
        rate=rate,
        trace=trace,
        speed=speed,
        requests=requests,
        seconds=seconds,
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        api_key=api_key,
        ttft=ttft,
        tpot=tpot,
        compare=compare,
        seed=seed,
        as_json=as_json,
    )


@app.command()
def document(
    out: Annotated[Path, typer.Option(help="Where to write it; pictures and JSON go beside it.")] = Path(
        "benchmarks.md"
    ),
    model: given.Model = given.DEFAULT,
    draft: Annotated[str, typer.Option(help="Ways to draft, with commas.")] = "ngram,suffix,layerskip,auto",
    width: Annotated[str, typer.Option(help="Widths, with commas.")] = "auto,3",
    simulated: Annotated[str, typer.Option(help="Drafts of the simulator's comparison, with commas.")] = "ngram,suffix",
    limit: Annotated[int | None, typer.Option(help="Prompts of each kind.", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    peer: Annotated[list[str] | None, typer.Option(help="transformers or llama-cpp; repeated.")] = None,
    threads: given.Threads = None,
) -> None:
    """Everything about one model on this machine as one document: comparison, pass costs, simulator."""
    from outrider.bench.compare_settings import CompareSettings, parse_widths
    from outrider.bench.document import Plan
    from outrider.cli.bench_compare import write_document

    settings = CompareSettings(
        model=model,
        draft=draft,
        widths=parse_widths(width),
        limit=limit,
        max_tokens=max_tokens,
        threads=threads,
        repeats=repeats,
        peers=tuple(peer or ()),
    )
    names = [one.strip() for one in simulated.split(",")]
    write_document(Plan(out=out, compare=settings, simulated=names, repeats=repeats))
