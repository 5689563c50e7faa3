"""Best of n: several answers are sampled at once, and the model's own likelihood of "yes, it is good" ranks them.

python examples/best_of_n.py --n 4
"""

from __future__ import annotations

from backends import parser, use_backend

import bough as sgl

QUESTION = "Write one short sentence about the sea."


@sgl.function
def best_of_n(s, question, num_samples):
    s += sgl.system("You write well.")
    s += sgl.user(question)
    samples = s.fork(num_samples)
    samples += sgl.assistant(sgl.gen("text", max_tokens=24, temperature=0.9, stop="\n"))
    samples += sgl.user("Is this a good sentence?")
    samples += sgl.assistant(sgl.select("good", ["yes", "no"]))
    samples.join()
    return [score(branch) for branch in samples]


def score(branch: sgl.ProgramState) -> float:
    """How much likelier "yes" is than "no"; where the backend tells no likelihoods, the choice itself."""
    meta = branch.get_meta_info("good")
    if "normalized_prompt_logprobs" in meta:
        yes, no = meta["normalized_prompt_logprobs"]
        return float(yes - no)
    return 1.0 if branch["good"] == "yes" else -1.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--n", type=int, default=3, help="how many answers to sample")
    chosen = options.parse_args()
    use_backend(chosen)
    state = best_of_n.run(question=QUESTION, num_samples=chosen.n)
    ranked = sorted(zip(state.ret_value, state["text"], strict=True), reverse=True)
    for rank, (points, text) in enumerate(ranked, start=1):
        print(f"{rank}. {points:+.3f} {text.strip()}")
    assert len(ranked) == chosen.n


if __name__ == "__main__":
    main()
