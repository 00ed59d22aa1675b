"""Train GPT-class models with numpy or cupy, on any number of ranks, with and without failures.

The engine is `autograd`, `ops`, `model`, `optim` and `step`; `data` and `checkpoint` read and write files;
`replicated`, `zero`, `pipeline`, `tensor` and `sharded` distribute a run; `redundancy` keeps state beyond the
end of a rank; `profiler` measures; `model_actors` supervises parts of a model.
May import collectives, actors and transport. Begin with `config`, `step.recipe` and `run.plain`.
The public names are re-exported here, lazily.
"""

from __future__ import annotations

from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals()):
    from zbmd.training.autograd import spans as spans
    from zbmd.training.checkpoint.sharded import SavedState as SavedState
    from zbmd.training.checkpoint.sharded import checkpoint_in as checkpoint_in
    from zbmd.training.checkpoint.sharded import load_trained as load_trained
    from zbmd.training.checkpoint.sharded import open_state as open_state
    from zbmd.training.config import GPTConfig as GPTConfig
    from zbmd.training.config import TrainingConfig as TrainingConfig
    from zbmd.training.data.corpus import Corpus as Corpus
    from zbmd.training.data.corpus import prepare_corpus as prepare_corpus
    from zbmd.training.data.token_corpus import TokenCorpus as TokenCorpus
    from zbmd.training.data.token_corpus import prepare_tokens as prepare_tokens
    from zbmd.training.data.tokenizers import BPETokenizer as BPETokenizer
    from zbmd.training.data.tokenizers import ByteTokenizer as ByteTokenizer
    from zbmd.training.data.tokenizers import Tokenizer as Tokenizer
    from zbmd.training.job.data_parallel import DataParallelTask as DataParallelTask
    from zbmd.training.job.data_parallel import TaskResult as TaskResult
    from zbmd.training.job.data_parallel import run_task as run_task
    from zbmd.training.model.generate import generate as generate
    from zbmd.training.model.generate import generate_tokens as generate_tokens
    from zbmd.training.model.gpt import GPT as GPT
    from zbmd.training.model.hugging_face import load_gpt2 as load_gpt2
    from zbmd.training.model.hugging_face import save_gpt2 as save_gpt2
    from zbmd.training.model.weights import load_weights as load_weights
    from zbmd.training.model.weights import save_weights as save_weights
    from zbmd.training.model_actors.actors import ComputingActor as ComputingActor
    from zbmd.training.model_actors.actors import LayerActor as LayerActor
    from zbmd.training.model_actors.actors import OperatorActor as OperatorActor
    from zbmd.training.model_actors.actors import TensorActor as TensorActor
    from zbmd.training.model_actors.actors import read_tensor as read_tensor
    from zbmd.training.model_actors.model_actors import ModelActors as ModelActors
    from zbmd.training.model_actors.model_actors import SupervisorActor as SupervisorActor
    from zbmd.training.model_actors.operator_devices import CudaDevice as CudaDevice
    from zbmd.training.model_actors.operator_devices import DeviceFault as DeviceFault
    from zbmd.training.model_actors.operator_devices import HostDevice as HostDevice
    from zbmd.training.model_actors.operator_devices import ModuleDevice as ModuleDevice
    from zbmd.training.model_actors.operator_devices import OperatorDevice as OperatorDevice
    from zbmd.training.model_actors.operator_devices import cuda_device as cuda_device
    from zbmd.training.model_actors.slot import ActorSlot as ActorSlot
    from zbmd.training.model_actors.slot import DescribeSlot as DescribeSlot
    from zbmd.training.model_actors.slot import RestartsExhausted as RestartsExhausted
    from zbmd.training.model_actors.slot import SlotActor as SlotActor
    from zbmd.training.model_actors.slot import SlotDescription as SlotDescription
    from zbmd.training.optim import OPTIMIZERS as OPTIMIZERS
    from zbmd.training.optim import AdamWConfig as AdamWConfig
    from zbmd.training.optim import LionConfig as LionConfig
    from zbmd.training.optim import MuonConfig as MuonConfig
    from zbmd.training.optim import OptimizerConfig as OptimizerConfig
    from zbmd.training.optim import SGDConfig as SGDConfig
    from zbmd.training.optim import optimizer_for as optimizer_for
    from zbmd.training.optim.clip import TrainingDiverged as TrainingDiverged
    from zbmd.training.profiler.lines import RankProfile as RankProfile
    from zbmd.training.profiler.lines import read_profiles as read_profiles
    from zbmd.training.run.audit import Audit as Audit
    from zbmd.training.run.audit import audit as audit
    from zbmd.training.run.ledger import CommitRecord as CommitRecord
    from zbmd.training.run.ledger import LogHeader as LogHeader
    from zbmd.training.run.ledger import read_log as read_log
    from zbmd.training.run.plain import PlainStep as PlainStep
    from zbmd.training.run.plain import PlainTrainer as PlainTrainer
    from zbmd.training.sharded.options import TrainOptions as TrainOptions
    from zbmd.training.sharded.run import open_recipe as open_recipe
    from zbmd.training.sharded.run import run_plain as run_plain
    from zbmd.training.sharded.run import train as train
    from zbmd.training.sharded.task import TrainResult as TrainResult
    from zbmd.training.step.memory_estimate import StepOutOfMemory as StepOutOfMemory
    from zbmd.training.step.recipe import Recipe as Recipe
    from zbmd.training.zero.options import ZeroOptions as ZeroOptions
