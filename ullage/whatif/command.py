"""Make and run a study from the options of ``ullage whatif``."""

import argparse
from pathlib import Path

from hwprofiles.files import check_output, write_whole
from hwprofiles.machine import num_cores
from planner.models.registry import list_models, models_with_formulas
from planner.terms import DAY_S
from ullage.cli.default_hardware import print_default_hardware
from ullage.cli.options import given_flags, known_options
from ullage.output.progress import progress_bar
from ullage.whatif.design import Space
from ullage.whatif.fields import ALIASES, Field
from ullage.whatif.prices import example_prices, load_prices
from ullage.whatif.questions import COMPARES_MACHINES, answer
from ullage.whatif.running.runner import Evaluator, run_study
from ullage.whatif.running.store import Store
from ullage.whatif.running.workers import in_processes, in_this_process
from ullage.whatif.sensitivity import sensitivities
from ullage.whatif.study import Study, StudyRequest, load_study
from ullage.whatif.tables import check_table_path, write_table

EXAMPLE_PRICES = "example"
_ASKING = ("set", "sweep", "design", "question", "certify", "tokens", "days")


def study_of(args: argparse.Namespace) -> Study:
    """Run the study that the options describe, write it and its table, and return it.

    Raises:
        ValueError: an option names something unknown, or options contradict each other.
        OSError: a file cannot be written.
    """
    output: Path = args.output
    check_output("--output", output, only_regular=True)  # a device or pipe cannot have the store beside it
    check_output("--output", store_path(output), only_regular=True)
    if args.table is not None:
        check_table_path(args.table)
    loaded = None
    if args.study is not None:
        _refuse_options_beside_file(args)
        loaded = load_study(args.study)
    request = loaded.request if loaded else study_request(args)
    prices = loaded.prices if loaded else None
    if args.prices:
        prices = example_prices() if args.prices == EXAMPLE_PRICES else load_prices(args.prices)
    if args.sensitivities and request.sweep:
        raise ValueError("--sensitivities needs a single point; leave out --sweep, or give its fields with --set")
    num_workers = args.workers or num_cores()
    runner = in_this_process if num_workers == 1 else in_processes(num_workers)
    if "hardware" not in request.set.keys() | request.sweep.keys() and request.question not in COMPARES_MACHINES:
        print_default_hardware(args)
    space = Space(request)
    with Store(store_path(output)) as store, progress_bar(time_left=True) as progress:
        evaluator = Evaluator(space, store, prices, runner, progress)
        study = answer(evaluator) if request.question else run_study(evaluator)
        if args.sensitivities:
            study = study.model_copy(update={"sensitivities": sensitivities(evaluator)})
    write_whole(output, study.to_json())
    if args.table is not None:
        write_table(study, args.table)
    return study


def study_request(args: argparse.Namespace) -> StudyRequest:
    """Return the study that the options describe."""
    found = {name: getattr(args, option.dest, None) for name, option in known_options().items()}
    options = {name: _text(value) for name, value in sorted(found.items()) if value is not None}
    design = args.design or {}
    sets = dict(_assignment("--set", text) for text in args.set or ())
    sweeps: dict[str, tuple[str, ...]] = {}
    for name, text in (_assignment("--sweep", text) for text in args.sweep or ()):
        if name in sweeps:
            raise ValueError(f"--sweep {name} is given twice; give all its values in one")
        sweeps[name] = (text,)
    if twice := sorted(options.keys() & (sets.keys() | sweeps.keys())):
        raise ValueError(f"{known_options()[twice[0]].flag} and {twice[0]}=... are both given; leave out one of them")
    if args.question == "largest" and "model" not in options.keys() | sets.keys() | sweeps.keys():
        counts = list_models()
        sweeps["model"] = (",".join(sorted(models_with_formulas(), key=counts.__getitem__)),)
    return StudyRequest(
        set=options | sets,
        sweep=sweeps,
        design=design.get("", "cartesian"),
        num_points=design.get("points"),
        seed=design.get("seed", 0),
        certify=bool(args.certify),
        tokens=args.tokens,
        deadline_s=args.days * DAY_S if args.days else None,
        question=args.question,
    )


def store_path(output: Path) -> Path:
    """Return the store for results of a study's points."""
    return output.with_name(f"{output.stem}.points.jsonl")


def matching_fields(args: argparse.Namespace) -> tuple[list[Field], dict[str, str]]:
    """Return the fields that can be varied, with the values of the given machine and model, and their other names.

    Raises:
        ValueError: no field has the text of ``--fields``.
    """
    if args.model is None:
        args.model = "opt-13b"  # all models have the same fields
    space = Space(study_request(args))
    wanted = [field for field in space.fields.values() if _matches(args.fields, field)]
    aliases = {name: field for name, field in ALIASES.items() if args.fields in name or args.fields in field}
    if not args.json and not wanted and not aliases:
        raise ValueError(f"no field has {args.fields!r} in its name or description; `ullage whatif --fields` lists all")
    return wanted, aliases


def _matches(text: str, field: Field) -> bool:
    known = [name for name, meant in ALIASES.items() if meant == field.name]
    return any(text.lower() in where.lower() for where in (field.name, field.words, *known))


def _text(value: object) -> str:
    """Return the value of an option as text."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _assignment(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{option} {text}: is not of the form FIELD=VALUE; give for example pcie=2x")
    return name, value


def _refuse_options_beside_file(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _ASKING if getattr(args, name) is not None] + given_flags(args)
    if given:
        raise ValueError(f"{args.study} is a whole study; leave out {given[0]}, or write it into the file")
