"""Elastic batch sizes: the published results, a reference that tries everything, the engine's section, the command."""

import json
import math
import random

import dsx
import pytest
import torch
from dsx.config import load_config
from dsx.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)

VERSION_1 = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}


def config(**changes):
    return {"elasticity": {**VERSION_1, **changes}}


def test_the_published_result_of_version_1():
    batch, valid = compute_elastic_config(config())
    assert batch == 1680 and len(valid) == 32
    assert valid[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15]


def test_the_published_result_of_version_2():
    found = compute_elastic_config(config(version=0.2, num_gpus_per_node=8), world_size=64, return_microbatch=True)
    batch, valid, micro = found
    assert (batch, len(valid), micro) == (1920, 16, 6)
    assert 64 in valid and all(count % 8 == 0 for count in valid)


def highly_composite(limit):
    """Numbers with more divisors than any smaller one, from their definition."""
    most, found = 0, []
    for number in range(1, limit + 1):
        divisors = sum(number % d == 0 for d in range(1, number + 1))
        if divisors > most:
            most = divisors
            found.append(number)
    return found


NUMBERS = highly_composite(1700)


def reference(most, sizes, low, high, larger):
    """The rule of version 0.1, tried out number by number."""
    best = None
    for base in {*sizes, math.lcm(*sizes)}:
        if base > most:
            continue
        batch = base * max(n for n in NUMBERS if base * n <= most)
        valid = [w for w in range(low, high + 1) if any(batch % (w * m) == 0 for m in sizes)]
        key = (len(valid), batch if larger else -batch)
        if valid and (best is None or key > best[0]):
            best = (key, batch, valid)
    return best and best[1:]


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_300_random_settings_agree_with_the_reference(version):
    random_, refused = random.Random(7), 0
    for _ in range(300):
        most = random_.randint(1, 1500)
        sizes = sorted(random_.sample(range(1, 40), random_.randint(1, 4)))
        low, larger = random_.randint(1, 20), random_.random() < 0.5
        high = low + random_.randint(0, 300)
        parallel = random_.choice([1, 2]) if version == 0.2 else 1
        per_node = parallel * random_.choice([1, 2, 4]) if version == 0.2 else 1
        section = {
            "enabled": True, "max_train_batch_size": most, "micro_batch_sizes": sizes, "min_gpus": low,
            "max_gpus": high, "prefer_larger_batch": larger, "version": version, "num_gpus_per_node": per_node,
            "model_parallel_size": parallel,
        }  # fmt: skip
        ranks = per_node // parallel
        nodes = (-(-low // per_node), high // per_node)
        possible = nodes[0] <= nodes[1] and max(sizes) <= most
        expected = reference(most // ranks, sizes, *nodes, larger) if possible else None
        if expected is None:
            refused += 1
            with pytest.raises(ElasticityError, match=r"got .*; expected"):
                compute_elastic_config({"elasticity": section}, world_size=low)
            continue
        batch, valid = expected[0] * ranks, [count * per_node for count in expected[1]]
        for world in random_.sample(valid, min(3, len(valid))):
            found = compute_elastic_config({"elasticity": section}, world_size=world, return_microbatch=True)
            data_parallel = world // parallel
            fitting = [m for m in sizes if batch // data_parallel % m == 0]
            wanted = fitting[0] if version == 0.2 and not larger else max(fitting)
            assert found == (batch, valid, wanted)
            assert batch % (data_parallel * wanted) == 0
    assert 0 < refused < 250


def test_version_1_refuses_a_world_size_that_does_not_divide_the_batch():
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"got 11 devices; expected one of 1, 2, 3"):
        compute_elastic_config(config(), world_size=11)


def test_version_2_gives_such_a_world_size_a_batch_of_its_own():
    batch, valid, micro = compute_elastic_config(config(version=0.2), world_size=11, return_microbatch=True)
    assert (batch, valid, micro) == (1980, [11], 6)  # 2000 // 66 * 66 is the largest of 1980, 1980, 1980
    with pytest.raises(ElasticityIncompatibleWorldSize, match="raise max_train_batch_size or use fewer devices"):
        compute_elastic_config(config(version=0.2, max_train_batch_size=20), world_size=11)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="expected 1 to 8"):
        compute_elastic_config(config(version=0.2, max_gpus=8), world_size=11)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"micro_batch_sizes": []}, "positive sizes"),
        ({"micro_batch_sizes": "2"}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [0]}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [4000]}, "raise max_train_batch_size"),
        ({"micro_batch_sizes": [2, 3000]}, "raise max_train_batch_size or remove the larger"),
        ({"model_parallel_size": 2}, r"model_parallel_size 2 with version 0\.1; expected 1"),
        ({"min_gpus": 8, "max_gpus": 2}, "min_gpus at most max_gpus"),
        ({"version": 0.3}, "0.1 or 0.2"),
        ({"version": 0.2, "num_gpus_per_node": 3, "model_parallel_size": 2}, "set num_gpus_per_node"),
        ({"max_batch": 3}, "max_batch"),
        ({"enabled": False}, "add it"),
    ],
)
def test_settings_that_contradict_themselves_are_named(changes, text):
    with pytest.raises(ElasticityConfigError, match=text):
        compute_elastic_config(config(**changes), world_size=4)


@pytest.mark.parametrize("key", ["max_train_batch_size", "micro_batch_sizes"])
def test_keys_without_which_there_is_no_batch_are_asked_for(key):
    section = {name: value for name, value in VERSION_1.items() if name != key}
    with pytest.raises(ElasticityConfigError, match=f"got no {key}; expected a value; add it"):
        compute_elastic_config({"elasticity": section}, world_size=4)
    with pytest.raises(dsx.DsxConfigError, match=f"add {key} to elasticity"):
        load_config({"elasticity": section}, world_size=4)
    assert load_config({"elasticity": {**section, "enabled": False}, "train_batch_size": 4}, world_size=4)


def test_where_no_number_of_devices_fits_a_given_one_does_not(monkeypatch):
    section = config(micro_batch_sizes=[1000], max_train_batch_size=1000, min_gpus=3)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="got no number of devices from 3 to 10000"):
        compute_elastic_config(section, world_size=3)
    with pytest.raises(ElasticityConfigError, match="got no number of devices from 3 to 10000"):
        compute_elastic_config(section)


def test_without_a_preference_version_2_takes_the_first_micro_batch_that_fits():
    """As the published code does; version 0.1 takes the largest in any case."""
    sizes = {"micro_batch_sizes": [8, 24, 16], "max_train_batch_size": 1000}
    for version, prefer, expected in ((0.2, False, 8), (0.2, True, 24), (0.1, False, 24)):
        section = config(**sizes, version=version, prefer_larger_batch=prefer)
        batch, _, micro = compute_elastic_config(section, world_size=1, return_microbatch=True)
        assert batch % 24 == 0 and micro == expected, (version, prefer)
    alone = config(**sizes, version=0.2, prefer_larger_batch=False)
    assert compute_elastic_config(alone, world_size=31, return_microbatch=True) == (744, [31], 8)


def test_what_version_2_needs_from_the_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
        compute_elastic_config(config(version=0.2))
    monkeypatch.setenv("WORLD_SIZE", "8")
    with_world = compute_elastic_config(config(version=0.2), world_size=8)
    assert len(with_world) == 3 and compute_elastic_config(config(version=0.2)) == with_world[:2]
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**VERSION_1, "max_train_batch_size": 1000}))
    with pytest.raises(ElasticityConfigError, match=r"max_train_batch_size: got 2000; expected 1000"):
        compute_elastic_config(config())
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "nonsense")
    with pytest.raises(ElasticityConfigError, match="cannot be read"):
        compute_elastic_config(config())
    with pytest.raises(ElasticityError, match=r"0\.3\.8 or newer"):
        compute_elastic_config(config(), target_deepspeed_version="0.3.7")


def test_an_engine_takes_its_batch_from_the_section():
    section = {"enabled": True, "max_train_batch_size": 48, "micro_batch_sizes": [2, 4], "version": 0.2}
    document = {"elasticity": section, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for world in (1, 2, 3, 4, 6):
        batch = load_config(document, world_size=world).batch
        assert batch.train == 48 and batch.train == batch.micro * batch.accumulation * world
    engine, *_ = dsx.initialize(model=torch.nn.Linear(2, 1), config=document)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (48, 4)
    assert engine.gradient_accumulation_steps() == 12


def test_a_stream_that_cannot_be_shared_out_anew_is_named(caplog):
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
    document = {"elasticity": section, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for stream, named in ((iter([1, 2]), True), (dsx.data.SharedStream([1, 2]), False), ([1, 2], False)):
        caplog.clear()
        dsx.initialize(model=torch.nn.Linear(2, 1), config=document, training_data=stream)
        assert ("wrap it in dsx.data.SharedStream" in caplog.text) is named


def test_batch_sizes_by_hand_beside_it_are_refused_or_ignored():
    section = {"enabled": True, "max_train_batch_size": 48, "micro_batch_sizes": [2, 4]}
    document = {"elasticity": section, "train_batch_size": 32}
    with pytest.raises(dsx.DsxConfigError, match="ignore_non_elastic_batch_info"):
        load_config(document, world_size=2)
    section["ignore_non_elastic_batch_info"] = True
    assert load_config(document, world_size=2).batch.train == 48
    section["max_gpus"] = 1
    with pytest.raises(dsx.DsxConfigError, match=r"elasticity: no batch suits it"):
        load_config(document, world_size=2)


def test_the_command(tmp_path, capsys):
    from dsx.cli import main

    file = tmp_path / "dsx.json"
    file.write_text(json.dumps(config()))
    assert main(["elastic", "-c", str(file)]) == 0
    printed = capsys.readouterr().out
    assert (
        "Elasticity config:" in printed
        and "final_batch_size .... 1680" in printed
        and "micro" not in printed.split("final")[1]
    )
    assert main(["elastic", "-c", str(file), "-w", "7"]) == 0
    assert "micro_batch_size .... 6" in capsys.readouterr().out
    assert main(["elastic", "-c", str(file), "-w", "11"]) == 1
    assert "got 11 devices" in capsys.readouterr().err
    assert main(["elastic", "-c", str(tmp_path / "none.json")]) == 1
