"""A job's code is the same on every host, or what differs is named; what ranks print is kept, bounded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from zbmd.actors.cluster.jobs import code_digest as job_code
from zbmd.actors.cluster.jobs.code_digest import REST, CodeDiffers, check_code, code_of
from zbmd.actors.cluster.state.job_table import COMMAND_BYTES_MAX, JobSpec, Submit, order_bytes
from zbmd.actors.process import output as job_output
from zbmd.actors.process.output import JobOutput, OutputLine
from zbmd.transport.errors import UserError


def job_in(directory: Path) -> Path:
    """A script with what belongs to it, and what does not."""
    for name in (
        "train.py",
        "model.py",
        "parts/layers.py",
        "notes.txt",
        ".hidden/x.py",
        "env/lib/y.py",
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"# {name}\n")
    (directory / "env" / "pyvenv.cfg").write_text("")
    return directory / "train.py"


def spec_of(script: Path) -> JobSpec:
    return JobSpec(job=0xABC, target=str(script), code=code_of(str(script), is_module=False))


def test_the_code_of_a_script(tmp_path: Path) -> None:
    script = job_in(tmp_path)
    code = code_of(str(script), is_module=False)
    assert [name for name, _ in code] == ["train.py", "model.py", "parts/layers.py"]
    assert len({digest for _, digest in code}) == 3
    check_code(spec_of(script))


def test_what_differs_is_named(tmp_path: Path) -> None:
    script = job_in(tmp_path)
    spec = spec_of(script)
    (tmp_path / "model.py").write_text("# changed\n")
    (tmp_path / "parts" / "layers.py").unlink()
    (tmp_path / "extra.py").write_text("")
    with pytest.raises(CodeDiffers) as differs:
        check_code(spec)
    told = str(differs.value)
    assert "these files differ: model.py; missing here: parts/layers.py" in told
    assert "only here: extra.py" in told
    assert "job abc" in told and "Copy the same files to every host" in told
    script.unlink()
    with pytest.raises(CodeDiffers, match="does not have the code of job abc: there is no script"):
        check_code(spec)


def test_the_code_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mypackage").mkdir()
    for name in ("__init__", "__main__", "part"):
        (tmp_path / "mypackage" / f"{name}.py").write_text(f"# {name}\n")
    (tmp_path / "other.py").write_text("")
    names = [name for name, _ in code_of("mypackage.part", is_module=True)]
    assert names == ["mypackage/__init__.py", "mypackage/__main__.py", "mypackage/part.py"]
    assert [name for name, _ in code_of("other", is_module=True)] == ["other.py"]
    with pytest.raises(UserError, match="there is no module nosuchmodule"):
        code_of("nosuchmodule", is_module=True)


def test_many_files_fit_into_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = job_in(tmp_path)
    for number in range(600):
        (tmp_path / f"a_module_with_a_long_name_{number:04}.py").write_text(f"# {number}\n")
    spec = spec_of(script)
    assert len(spec.code) == job_code.FILES_MAX + 1 and spec.code[-1][0] == REST
    assert order_bytes(Submit(spec=spec)) < COMMAND_BYTES_MAX
    check_code(spec)
    (tmp_path / "a_module_with_a_long_name_0599.py").write_text("# changed\n")
    with pytest.raises(CodeDiffers, match="these files differ: some of the other files"):
        check_code(spec)
    monkeypatch.setattr(job_code, "FILES_READ_MAX", 100)
    with pytest.raises(UserError, match="more than 100 Python files below"):
        code_of(str(script), is_module=False)


def test_a_spec_with_its_code_survives_the_wire(tmp_path: Path) -> None:
    order = Submit(spec=spec_of(job_in(tmp_path)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Submit) == order


def line(text: str) -> OutputLine:
    return OutputLine(rank=0, incarnation=1, stream="stdout", text=text.encode())


def test_the_newest_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_output, "LINES_MAX", 3)
    output = JobOutput()
    for number in range(5):
        output.add(1, line(str(number)))
    first, lines = output.since(1, 0)
    assert first == 2 and [one.text for one in lines] == [b"2", b"3", b"4"]
    assert output.since(1, 4) == (4, [line("4")])
    assert output.since(1, 5) == (5, [])
    assert output.since(2, 0) == (0, [])
    monkeypatch.setattr(job_output, "ANSWER_BYTES_MAX", 40)
    assert output.since(1, 2) == (2, [line("2")]), "more in the next answer"
    monkeypatch.setattr(job_output, "JOBS_MAX", 1)
    output.add(2, line("other"))
    assert output.since(1, 0) == (0, [])
