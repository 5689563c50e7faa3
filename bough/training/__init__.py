"""Trains heads that draft for a model (`bough train-draft`): EAGLE-3 and Medusa.

in: a model, prompts and its own answers to them. out: a checkpoint that `--speculative-draft-model-path` takes, and how many
tokens a step yields with it. never: a request.
"""
