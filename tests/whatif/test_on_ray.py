import pytest

from ullage.main import main

pytest.importorskip("ray")


def test_two_ray_workers_find_the_same(tiny, tmp_path, capsys):
    command = ["whatif", "--model", tiny, "--hardware", "a100-80", "--sweep", "pcie=1x..4x..1x", "--json"]
    assert main([*command, "--workers", "1", "--output", str(tmp_path / "one.json")]) == 0
    here = capsys.readouterr().out
    assert main([*command, "--workers", "2", "--ray", "--output", str(tmp_path / "ray.json")]) == 0
    assert capsys.readouterr().out.endswith(here)
    assert (tmp_path / "ray.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_no_cluster_is_one_line(tiny, tmp_path, capsys):
    arguments = ["whatif", "--model", tiny, "--hardware", "a100-80", "--output", str(tmp_path / "s.json")]
    assert main([*arguments, "--ray", "127.0.0.1:1"]) == 2
    assert "no Ray cluster at 127.0.0.1:1" in capsys.readouterr().err
