"""gradio remembers the temporary folder of its first import and recreates it for every page."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def first_import(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("gradio")))
        patch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
        import gradio  # noqa: F401
