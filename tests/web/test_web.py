"""The page without a browser: what it answers, what it refuses, and what it never does."""

import ast
import asyncio
import contextlib
import copy
import http.client
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import QUICK, Served
from starlette.requests import Request

import ullage
from ullage.main import main
from ullage.web import worker
from ullage.web.app import Site
from ullage.web.jobs import _Turns
from ullage.web.question import MOST_BYTES, Question, question_of, tamed

ROOT = Path(__file__).parents[2]
LLAMA = ullage.to_hf_config_dict(ullage.resolve_model("tinyllama-1.1b")) | {"num_hidden_layers": 3}
PROFILE = ullage.load_profile("h100").model_dump(mode="json", exclude_none=True)


def result(served: Served, kind: str = "answer", **asked: object) -> dict:
    status, lines = served.ask(kind, QUICK | asked)
    assert status == 200
    assert "result" in lines[-1], lines[-1]
    return lines[-1]["result"]


def first(served: Served, **asked: object) -> dict:
    """Return the first answer, and leave."""
    with contextlib.closing(http.client.HTTPConnection("localhost", served.port)) as connection:
        connection.request("POST", "/api/answer", json.dumps(QUICK | asked), {"content-type": "application/json"})
        with connection.getresponse() as answer:
            return next(found for line in answer if (found := json.loads(line).get("first")))


def test_only_public_names_are_used() -> None:
    for path in (ROOT / "ullage" / "web").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        imported = {
            name
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        ours = {name for name in imported if name.split(".")[0] in {"ullage", "planner", "hwprofiles", "executor"}}
        assert all(name == "ullage" or name.startswith("ullage.web") for name in ours), (path, ours)
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ullage"
        }
        assert used <= set(ullage.__all__)


def test_an_answer_is_that_of_the_command_line(served: Served) -> None:
    found = result(served)
    plan_text = result(served, "plan")
    plan = ullage.Plan.model_validate_json(plan_text)
    assert found["numbers"]["iteration_s"] == plan.prediction.iteration_s
    assert found["command"] == "ullage plan --model opt-125m --hardware h100 --gpus 1"
    assert found["part"]["sentence"] == ullage.summary(plan).sentence
    call = ast.parse(found["python"]).body[1].value
    assert ast.literal_eval(call.args[0]) == "opt-125m"
    assert {each.arg: ast.literal_eval(each.value) for each in call.keywords} == {"hardware": "h100", "gpus": 1}


def test_every_option_reaches_the_command_and_the_planner() -> None:
    asked = Question(
        **QUICK,
        gpus=8,
        seq_len=512,
        step_tokens=8192,
        how="qlora",
        rank=4,
        optimizer="lion",
        precision="fp8",
        storage="nvme",
    )
    words = asked.command()
    for part in (
        "--gpus 8",
        "--seq-len 512",
        "--global-batch 16",
        "--lora rank=4",
        "--quantize nf4",
        "--optimizer lion",
        "--storage nvme",
        "--precision bf16,products=fp8",
    ):
        assert part in words
    assert "global_batch=16" in asked.python()


def test_reasons_details_reports_sweeps_and_remedies(served: Served) -> None:
    result(served)
    why = result(served, "why")
    assert {"fits", "speed", "best", "peaks", "engines"} <= set(why)
    assert why["best"]["about"]["proof"]
    details = result(served, "details")
    assert "gantt" in {figure["key"] for figure in details["figures"]}
    report = result(served, "report")
    assert report.startswith("<!doctype html>")
    swept = result(served, "sweep", axis="gpus")
    assert [point["value"] for point in swept["points"]] == ["1", "2", "4", "8", "16", "32", "64"]
    speeds = [point["tokens_per_s"] for point in swept["points"] if point["tokens_per_s"]]
    assert speeds == sorted(speeds)
    misfit = first(served, model="opt-2.7b", machine="epyc-turin-2c")
    assert not misfit["fits"]
    assert misfit["missing_bytes"]
    assert "may help" in misfit["error"]


def test_what_may_be_used_is_what_is_used(served: Served) -> None:
    uses = {}
    for storage in ("gpu", "never", "activations", "nvme"):
        shown = result(served, machine="rtx4090-12ssd", storage=storage, seq_len=256)
        assert shown["fits"]
        (peaks,) = [section for section in shown["part"]["sections"] if section["key"] == "peaks"]
        uses[storage] = {row[0] for part in peaks["parts"] if part["id"] for row in part["table"]["rows"]}
    assert not any("host" in name for name in uses["gpu"])
    _, lines = served.ask("answer", {"model": "opt-125m", "machine": "a100-cluster", "storage": "nvme"})
    assert "drives" in lines[-1]["error"]
    alone = first(served, model="llama-3-8b", machine="rtx-4090", storage="gpu")
    assert "does not fit in GPU memory alone" in alone["error"]


def test_what_is_computed_from_formulas_is_answered_on_a_slow_machine_too(monkeypatch, tmp_path) -> None:
    lines = list[dict]()
    monkeypatch.setattr(worker, "_SLOW_S", 0.0)
    asked = Question(**QUICK)
    worker.KINDS["answer"](asked, asked.options(tmp_path), None, lambda **line: lines.append(line))
    assert lines[-1]["result"]["fits"]
    assert "note" not in lines[-1]["result"]


def test_the_cheapest_machine_is_found_with_few_plans(served: Served) -> None:
    status, lines = served.ask("cheapest", QUICK | {"tokens": 3e9, "days": 5.0})
    assert status == 200
    found = lines[-1]["result"]
    rows, others = found["rows"], found["others"]
    ordered = [(row["late"], row["cost"]) for row in rows]
    assert ordered == sorted(ordered)
    partial = [line["first"]["rows"] for line in lines if "first" in line]
    assert [len(each) for each in partial] == list(range(1, len(rows) + 1))  # each machine as soon as it is known
    assert others["count"] > len(rows)
    assert others["proven"]
    assert others["cost"] >= rows[0]["cost"]
    for row in rows:
        bound = ullage.bound_tokens_per_s("opt-125m", hardware=row["machine"], gpus=row["gpus"])
        assert row["tokens_per_s"] <= bound
        assert row["run_s"] == pytest.approx(3e9 / row["tokens_per_s"])
        assert row["late"] is (row["run_s"] > 5 * 86400)


def test_files_of_visitors_are_planned(served: Served) -> None:
    found = result(served, model="my model.json", config=LLAMA, machine="Büro 1", profile=PROFILE)
    assert found["part"]["title"] == "my-model on 1 device of b-ro-1"
    assert "--model my-model/config.json --hardware b-ro-1.json" in found["command"]
    same = result(served, model="my-model", config=LLAMA)
    assert found["numbers"]["iteration_s"] == same["numbers"]["iteration_s"]
    assert found["numbers"]["per_device_hour"] is None


def test_equal_questions_are_planned_once(served: Served) -> None:
    first = result(served, seq_len=256)
    before = served.jobs.num_started
    assert result(served, seq_len=256, tokens=1e12, days=3) == first
    assert served.jobs.num_started == before


def test_who_leaves_ends_the_work(served: Served) -> None:
    connection = http.client.HTTPConnection("localhost", served.port)
    body = json.dumps({"model": "llama-3-70b", "machine": "h100", "gpus": 8, "step_tokens": 2**22, "seq_len": 4096})
    connection.request("POST", "/api/cheapest", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline()
    assert served.jobs.num_running == 1
    answer.close()
    connection.close()
    for _ in range(1500):
        if not served.jobs.num_running:
            break
        time.sleep(0.02)
    assert served.jobs.num_running == 0


def test_what_takes_too_much_is_one_line(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.jobs, "memory_bytes", 1 << 20)
    status, lines = served.ask("answer", QUICK | {"seq_len": 320})
    assert status == 200
    assert "memory" in lines[-1]["error"]
    monkeypatch.undo()
    monkeypatch.setattr(served.jobs, "cpu_s", 1)
    _, lines = served.ask("cheapest", {"model": "llama-3-70b", "seq_len": 320})
    assert "more memory or time" in lines[-1]["error"]
    monkeypatch.undo()
    monkeypatch.setattr(served.jobs, "most_s", 0.5)
    _, lines = served.ask("cheapest", {"model": "llama-3-70b", "seq_len": 384})
    assert "takes longer" in lines[-1]["error"]


def test_a_question_that_is_too_long_is_not_read(served: Served) -> None:
    status, lines = served.ask("answer", b" " * MOST_BYTES + b"{}")
    assert status == 400
    assert "is longer than" in lines[0]["error"]


def test_too_many_at_once_are_asked_to_come_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.jobs, "most_waiting", -2)
    status, body, headers = served.request("POST", "/api/answer", json.dumps(QUICK | {"seq_len": 448}).encode())
    assert (status, headers["retry-after"]) == (503, "60")
    assert "try again" in json.loads(body)["error"]


def test_headers_are_those_that_owasp_asks_for(served: Served) -> None:
    for path in ("/", "/assets/web.js", "/api/choices", "/nothing"):
        _, _, headers = served.request("GET", path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"host": "plans.example.org"}, 200),
        ({"host": "plans.example.org:80", "origin": "http://plans.example.org:80"}, 200),
    ],
)
def test_other_hosts_and_sites_are_refused(served: Served, headers: dict[str, str], status: int) -> None:
    found, lines = served.ask("answer", QUICK, **headers)
    assert found == status
    assert status == 200 or "error" in lines[0]


PATHS = [
    "/etc/passwd", "../../etc/passwd", "~/.ssh/id_rsa", "~", ".", "..", "/", "/proc/self/environ", "file:///etc/passwd",
    "./config.json", "models/config.json", "models/llama", "C:\\windows\\win.ini", "\\\\host\\share", "%2e%2e%2fetc",
    "....//....//etc/passwd", "/dev/stdin", "/dev/zero", "/dev/fd/0", "os:getcwd", "canary:make", "subprocess:run",
    "builtins:exec", "a.b.c:d", "__main__:x", "llama-3-8b\0", "llama-3-8b\n", " llama-3-8b", "llama-3-8b/../x",
    "https://example.org/config.json", "hf://x/y", "s3://x", "org/model", "-h", "--help", "--model=x", "$(id)", "`id`",
    "; id", "| id", "&& id", "{{7*7}}", "${7*7}", "%s%s%n", "local", "LOCAL", "null", "None", "0", "\u202egnp.exe",
    "'; DROP TABLE models; --", "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "javascript:alert(1)",
    "x" * 101, "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
]  # fmt: skip
NUMBERS = [
    0,
    -1,
    1.5,
    10**9,
    2**63,
    2**64,
    10**30,
    10**400,
    1e300,
    -0.0,
    "1",
    "",
    None,
    True,
    [],
    {},
    [1],
    "0x10",
    "1e3",
]
FIELDS = ("gpus", "seq_len", "step_tokens", "rank")
WORDS = ["", "x", "FULL", "full ", 1, None, [], {}, "../x", "<b>", "x" * 10_000, "\0"]
KINDS = ("how", "optimizer", "precision", "storage", "axis")
TEXTS = [
    b"", b"{", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"{}garbage", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"gpus": NaN}', b'{"gpus": Infinity}', b'{"tokens": -Infinity}', b'{"gpus": ' + b"9" * 5000 + b"}",
    b'{"unknown": 1}', b'{"__class__": "x"}', b'{"config": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b"x" * (256 * 1024 + 1), pickle.dumps({"model": "x"}), b"PK\x03\x04", b"\x1f\x8b\x08",
    b'{"model": "llama-3-8b", "config": 1}', b'{"profile": "/etc/passwd"}', b'{"profile": []}', b'{"config": {}}',
    b'{"profile": {}}', b'{"step_tokens": 100}', b'{"step_tokens": 100, "seq_len": 64}',
]  # fmt: skip
CONFIGS = [
    {"model_type": "llama"}, LLAMA | {"num_hidden_layers": 10**9}, LLAMA | {"hidden_size": -1},
    LLAMA | {"num_hidden_layers": "2; rm -rf /"}, LLAMA | {"vocab_size": 10**30}, LLAMA | {"hidden_size": 1e99},
    LLAMA | {"model_type": "os"}, LLAMA | {"model_type": ["llama"]}, {"model_type": "bert", "num_hidden_layers": 10**9},
    {"model_type": "bert", "hidden_size": 10**30}, {"model_type": "gemma", "hidden_size": 1e99},
    {"model_type": "bert", "vocab_size": -1}, {"model_type": "auto"},
    {"model_type": "bert", "architectures": ["os.system"]},
    LLAMA | {"model_type": "../x"}, LLAMA | {"num_attention_heads": 0}, LLAMA | {"rope_scaling": 1, "hidden_act": "id"},
]  # fmt: skip
PROFILES = [
    {"schema_version": 10**9}, {"schema_version": "1"}, PROFILE | {"devices_per_node": -1}, PROFILE | {"device": None},
    PROFILE | {"unknown": {"a": 1}}, PROFILE | {"devices_per_node": "eight"}, PROFILE | {"name": 1},
    PROFILE | {"host": {"memory_bytes": "x"}},
]  # fmt: skip


def hostile() -> list[bytes]:
    asked: list[object] = [QUICK | {"model": text} for text in PATHS]
    asked += [QUICK | {"machine": text} for text in PATHS]
    asked += [QUICK | {name: value} for name in FIELDS for value in NUMBERS if value is not None or name == "gpus"]
    asked += [QUICK | {name: text} for name in KINDS for text in WORDS if text is not None or name == "how"]
    asked += [QUICK | {"config": config} for config in CONFIGS]
    asked += [QUICK | {"profile": profile} for profile in PROFILES]
    return [json.dumps(each).encode() for each in asked] + TEXTS


def test_hostile_questions_have_no_effect_but_one_line(served: Served, tmp_path: Path) -> None:
    (tmp_path / "canary.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w').close()\ndef make(): ...\n")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "h.json").write_text(json.dumps(PROFILE))
    sys.path.insert(0, str(tmp_path))  # jobs look for modules where this process does
    try:
        own = [QUICK | {"model": str(tmp_path)}, QUICK | {"model": str(tmp_path / "config.json")}]
        own += [QUICK | {"machine": str(tmp_path / "h.json")}, QUICK | {"model": "canary:make"}]
        bodies = hostile() + [json.dumps(each).encode() for each in own]
        assert len(bodies) >= 200
        for body in bodies:
            status, text, _ = served.request("POST", "/api/answer", body)
            lines = [json.loads(line) for line in text.splitlines()]
            assert status in {200, 400}, (body[:200], text)
            assert [name for line in lines for name in line if name != "progress"] == ["error"], (body[:200], lines)
            error = lines[-1]["error"]
            assert "\n" not in error
            assert 5 < len(error) <= 1000
            assert not any(word in error for word in ("Traceback", "ullage-web-", "failed (", "site-packages")), error
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "touched").exists()
    assert served.jobs.num_running == 0
    assert result(served)["fits"]
    for path in ("/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/app.py", "/etc/passwd", "/api/", "/docs"):
        assert served.request("GET", path)[0] in {404, 405}


def test_only_this_machines_user_names_models_on_its_disk() -> None:
    text = json.dumps(QUICK | {"model": "org/model"}).encode()
    with pytest.raises(ValueError, match="no model is called"):
        question_of(text, public=True)
    assert question_of(text, public=False).model == "org/model"
    for path in set(PATHS) - {"org/model", "models/llama", "models/config.json", "null", "None", "0"}:
        try:
            found = question_of(json.dumps(QUICK | {"model": path}).encode(), public=False).model
        except ValueError:
            continue
        assert not Path(found).exists()


def test_the_command_serves_until_it_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["web", "--port", str(port)]) == 2
        assert "give another one" in capsys.readouterr().err
    command = [sys.executable, "-m", "ullage", "web", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert f"http://localhost:{port}/" in process.stderr.readline()
    connection = http.client.HTTPConnection("localhost", port)
    connection.request("GET", "/")  # it listens already, and answers when it is ready
    assert b"What would it take" in connection.getresponse().read()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait() == 130
    assert process.stderr.readline() == "ullage web: interrupted\n"
    os.killpg(process.pid, signal.SIGKILL)  # what jobs would have been forked from may still import


def test_other_servers_know_the_page_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Site.of_environment() == Site()
    monkeypatch.setenv("ULLAGE_WEB_HOSTS", "A.example, b.example")
    site = Site.of_environment()
    assert site.public
    assert {"a.example", "b.example"} < site.hosts
    monkeypatch.setenv("SPACE_HOST", "me-page.hf.space")
    assert Site.of_environment().frames == "https://huggingface.co"
    assert "me-page.hf.space" in Site.of_environment().hosts
    assert Site.of_environment().proxies == 1
    monkeypatch.setenv("ULLAGE_WEB_PROXIES", "2")
    assert Site.of_environment().proxies == 2
    assert callable(importlib.import_module("ullage.web.app").app)


def test_any_architecture_of_transformers_is_planned_from_its_file(served: Served, tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    code = {"AutoConfig": "canary.Config", "AutoModelForMaskedLM": "canary.Model"}
    (tmp_path / "canary.py").write_text("raise SystemExit\n")
    traps = {
        "auto_map": code,
        "_name_or_path": str(tmp_path),
        "tokenizer_file": "/etc/passwd",
        "trust_remote_code": True,
    }
    traps |= {
        "attn_implementation": "org/kernels",
        "quantization_config": {"quant_method": "os"},
        "torch_dtype": "../x",
    }
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **small}
    found = result(served, model="mine.json", config=config | traps, seq_len=64)
    assert found["part"]["title"].startswith("mine on ")
    assert tamed(config | traps) == config | {"architectures": config["architectures"]}
    _, lines = served.ask("answer", QUICK | {"config": {"model_type": "nothing-like-it"}})
    assert "does not know model_type" in lines[-1]["error"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab.-_ /\\:~$\n\0"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_text_of_a_config_can_name_a_file_or_code(given_value: object) -> None:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for each in value.values() for text in texts(each)]
        return (
            [text for each in value for text in texts(each)]
            if isinstance(value, list)
            else [value] * isinstance(value, str)
        )

    for text in texts(tamed({"model_type": "x", "field": given_value})):
        assert not set(text) & set("/\\:~$\n\0")
        assert not text.startswith((".", "-"))


def test_visitors_take_turns_and_none_has_all_workers() -> None:
    async def asked() -> list[str]:
        turns, order, free = _Turns(3, 2), [], asyncio.Event()

        async def work(visitor: str) -> None:
            async with turns.one(visitor):
                order.append(visitor)
                await free.wait()

        greedy = [asyncio.create_task(work("a")) for _ in range(6)]
        await asyncio.sleep(0)
        assert order == ["a", "a"]
        assert turns.must_wait("a")
        assert not turns.must_wait("b")
        greedy.pop().cancel()
        others = [asyncio.create_task(work(visitor)) for visitor in "bc"]
        await asyncio.sleep(0)
        assert order == ["a", "a", "b"]
        free.set()
        await asyncio.gather(*greedy, *others)
        assert turns.num_free == 3
        assert not turns.has
        free.clear()
        alone = [asyncio.create_task(work("")) for _ in range(3)]  # who is the only visitor has all
        await asyncio.sleep(0)
        assert turns.must_wait("")
        free.set()
        await asyncio.gather(*alone)
        return order[:4]

    assert asyncio.run(asked()) == ["a", "a", "b", "c"]


def test_one_visitor_asks_a_few_questions_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.jobs, "most_each", 0)
    status, body, _ = served.request("POST", "/api/answer", json.dumps(QUICK | {"seq_len": 480}).encode())
    assert status == 503
    assert "from your address" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("proxies", "forwarded", "visitor"),
    [
        (0, "9.9.9.9", "1.2.3.4"),
        (1, "9.9.9.9, 5.6.7.8", "5.6.7.8"),
        (2, "9.9.9.9, 5.6.7.8", "9.9.9.9"),
        (3, "9.9.9.9, 5.6.7.8", "1.2.3.4"),
        (1, "x", "unknown"),
        (1, "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        (1, None, "1.2.3.4"),
    ],
)
def test_the_address_of_a_visitor(proxies: int, forwarded: str | None, visitor: str) -> None:
    headers = [] if forwarded is None else [(b"x-forwarded-for", forwarded.encode())]
    request = Request({"type": "http", "client": ("1.2.3.4", 1), "headers": headers})
    assert Site(public=True, proxies=proxies).visitor(request) == visitor
    assert not Site().visitor(request)


def test_hub_ids_of_packaged_models_are_their_names() -> None:
    asked = question_of(json.dumps({"model": "Facebook/OPT-125m"}).encode(), public=True)
    assert asked.model == "opt-125m"
    assert copy.copy(asked).key("answer") == asked.key("plan").replace('"plan"', '"answer"')
