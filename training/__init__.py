"""Train GPT-class models with numpy or cupy, on any number of ranks, with and without failures.

The engine is `autograd`, `ops`, `model`, `optim` and `step`; `data` and `checkpoint` read and write files;
`replicated`, `zero`, `pipeline`, `tensor` and `sharded` distribute a run; `redundancy` keeps state beyond the
end of a rank; `profiler` measures; `model_actors` supervises parts of a model.
May import collectives, actors and transport. Begin with `config`, `step.recipe` and `replicated.plain`.
The public names are re-exported here, lazily.
"""
