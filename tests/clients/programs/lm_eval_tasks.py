"""lm-eval on local tasks: log-probabilities of given answers, and generated ones.

Its tokenizer is the model's own files, or the server's endpoints.
"""

import os
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parents[1] / "tasks"
ADDRESS = {"base_url": f"{os.environ['BASE_URL']}/completions", "num_concurrent": 4}
LOCAL = {"tokenizer_backend": "huggingface", "tokenizer": os.environ["MODEL_DIRECTORY"]}
REMOTE = {"tokenizer_backend": "remote", "auth_token": os.environ["API_KEY"]}
os.environ["OPENAI_API_KEY"] = os.environ["API_KEY"]
# The tasks name their data relative to it.
os.chdir(TASKS)


def evaluate(model: str, **options: object) -> dict[str, float]:
    """Return the share of right answers by task."""
    found = simple_evaluate(
        model="local-completions",
        model_args={"model": model, "max_length": 512, **ADDRESS, **options},
        tasks=["choose_reversed", "write_reversed"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
    )["results"]
    return {
        "chosen": found["choose_reversed"]["acc,none"],
        "written": found["write_reversed"]["exact_match,none"],
    }


assert evaluate(os.environ["MODEL"], **LOCAL) == {"chosen": 1.0, "written": 1.0}
assert evaluate(os.environ["BASE_MODEL"], **LOCAL) == {"chosen": 0.0, "written": 0.0}
assert evaluate(os.environ["MODEL"], **REMOTE) == {"chosen": 1.0, "written": 1.0}
