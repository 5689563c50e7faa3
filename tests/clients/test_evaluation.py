"""lm_eval with the server's tokenizer and the default model: log-likelihoods and answers of tasks of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
ROWS = [
    {"country": "France", "choices": ["Paris", "Tokyo", "Banana"], "label": 0},
    {"country": "Japan", "choices": ["Rome", "Tokyo", "Oslo"], "label": 1},
    {"country": "Italy", "choices": ["Rome", "Paris", "Cairo"], "label": 0},
]
TASKS = {
    "capitals": """output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "answers": """output_type: generate_until
doc_to_text: "Q: What is the capital of {{country}}? A:"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


def test_lm_eval(url: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/rows.jsonl}}\ntest_split: train\n"
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{source}{task}")
    command = [
        sys.executable, "-m", "lm_eval", "--model", "local-completions",
        "--model_args", f"base_url={url}/v1/completions,model=default,tokenizer_backend=remote,num_concurrent=4",
        "--tasks", ",".join(TASKS), "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]
    assert results["capitals"]["acc,none"] == 1.0
    (samples,) = (tmp_path / "out").rglob("samples_answers_*.jsonl")
    answers = [json.loads(line)["filtered_resps"][0] for line in samples.read_text().splitlines()]
    assert len(answers) == len(ROWS)
    assert any(answers)
    assert not any("\n\n" in answer for answer in answers)
