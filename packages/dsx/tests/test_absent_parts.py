"""Names of parts that do not exist yet say so, as keys of the configuration do; misspelt names are ordinary errors."""

import dsx
import pytest


@pytest.mark.parametrize("name", ["linear"])
def test_a_part_that_is_not_there_yet_says_what_brings_it(name):
    with pytest.raises(AttributeError, match=f"dsx.{name} is not available yet; it comes with"):
        getattr(dsx, name)
    assert not hasattr(dsx, name)


def test_any_other_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="module 'dsx' has no attribute 'initialise'"):
        dsx.initialise


def test_the_names_of_pipelines_are_at_the_top_as_scripts_write_them():
    import dsx_pipe.tensor

    assert dsx.PipelineModule is dsx_pipe.PipelineModule
    assert dsx.tp_model_init is dsx_pipe.tensor.tp_model_init
