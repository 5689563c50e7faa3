"""Routes of models that make vectors or scores of texts: embeddings, reranking, scores, classes, moderation.

in: JSON of OpenAI's, Jina's, vLLM's and SGLang's clients. out: theirs. never: how a model pools (`engine_client.pooling`).
"""
