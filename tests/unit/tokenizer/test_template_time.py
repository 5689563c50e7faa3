"""A chat template may compute for a second; how long the machine stands still meanwhile does not count."""

from __future__ import annotations

import time

from bough.tokenizer.template_sandbox import RENDER_TIME_S, TemplateEnvironment, compile_template, render_bounded


def test_time_that_the_machine_takes_is_not_the_templates() -> None:
    environment = TemplateEnvironment()
    environment.globals["pause"] = lambda: time.sleep(RENDER_TIME_S + 0.2)
    source = "{{ pause() or '' }}{% for at in range(500) %}{{ messages[0].content }}{% endfor %}"
    rendered = render_bounded(environment, compile_template(environment, source), {"messages": [{"content": "x"}]})
    assert rendered == "x" * 500
