"""`RULES`: the pairs of features that do not work together, each with the reason and the alternative.

Checks of a single value are not in the list.
"""

from __future__ import annotations

from . import features as f
from .codec_rules import CODEC_RULES
from .lora_rules import LORA_RULES
from .rule import Rule
from .sharding_rules import SHARDING_RULES


WITHOUT_KEEP_LOCAL = "Leave `keep_local` out, or use a method that averages parameters, such as aggregation='fedavg'."

RULES: tuple[Rule, ...] = (
    # ---- Averaging and distillation
    Rule(
        f.OTHER_THAN_FEDAVG,
        f.PREDICTIONS_ONLY,
        "there is nothing to average, because clients send predictions and no parameters",
        "Leave `aggregation` out.",
    ),
    Rule(
        f.NO_PARAMETERS,
        f.AVERAGES_PARAMETERS,
        "the distillation starts from the mean of the clients' parameters, which clients do not send",
        "Leave `aggregation` out, or use a distillation of predictions, such as distillation='mhat'.",
    ),
    # ---- Models of the clients
    Rule(
        f.PRIVATE_MODELS,
        f.SHARED_MODEL,
        "the method needs a private model of each client",
        "Pass `client_model_init` or `clients`.",
    ),
    Rule(
        f.ONE_MODEL,
        f.OWN_MODELS,
        "clients exchange parameters, which must fit all models",
        "Use a method that exchanges predictions: distillation='fedid', 'adafd', 'dsfl' or 'mhat'.",
    ),
    Rule(
        f.SENDS_PARAMETERS,
        f.OWN_MODELS,
        "clients receive parameters, which must fit all models",
        "Use a method that exchanges predictions: distillation='fedid', 'adafd', 'dsfl' or 'mhat'.",
    ),
    Rule(
        f.FORWARD_DERIVATIVES,
        f.QUANTIZED,
        "the layers of a quantized model have no forward derivative",
        "Set `feedback` to 'mpl', 'mpl_sampled' or 'none', or load the server's model without quantization.",
    ),
    # ---- Exchanged and local tensors
    Rule(
        f.KEEP_LOCAL,
        f.ANY_DISTILLATION,
        "the server predicts with whole models of clients, or clients already keep their own models",
        WITHOUT_KEEP_LOCAL,
    ),
    Rule(f.KEEP_LOCAL, f.NO_PARAMETERS, "each client already keeps its own model", WITHOUT_KEEP_LOCAL),
    Rule(f.KEEP_LOCAL, f.PRIVATE_MODELS, "each client already keeps its own model", WITHOUT_KEEP_LOCAL),
    Rule(
        f.KEEP_LOCAL,
        f.TRAINS_ON_SERVER,
        "the server trains on its own examples and has none of the clients' tensors",
        WITHOUT_KEEP_LOCAL,
    ),
    Rule(
        f.OTHER_KEEP_LOCAL,
        f.KEEPS_TENSORS,
        "the method selects the local tensors itself",
        "Leave `keep_local` out, and set the tensors in `aggregation_kwargs`.",
    ),
    Rule(
        f.ADAPTER_EXCHANGE,
        f.NO_ADAPTER,
        "there is no adapter to exchange",
        "Wrap it with `peft.get_peft_model`, or use exchange='trainable'.",
        checked_by="Exchange",
    ),
    Rule(
        f.FREEZE,
        f.PEFT,
        "PEFT already freezes the model that it wraps",
        "Freeze a model before wrapping it.",
        checked_by="freeze_layers",
    ),
    Rule(
        f.ROBUST,
        f.MORE_FACTORS,
        "the method compares changes of parameters, and the change of the adapter is a product of more than two "
        "factors",
        "Use LoRA, or aggregation='fedavg'.",
        checked_by="RobustAggregation.check_exchange",
    ),
    Rule(
        f.ROBUST_WITHOUT_FACTORS,
        f.BOTH_FACTORS,
        "a momentum of the product `B A` is no product of factors",
        "Freeze the factors A, for example with `parameter.requires_grad_('lora_A' not in name)` for all named "
        "parameters before the trainer is built.",
        checked_by="RobustAggregation.check_exchange",
    ),
    Rule(
        f.ROBUST_OPTIMIZER,
        f.BOTH_FACTORS,
        "a server optimizer steps on single tensors, but the factors have no meaning apart",
        "Leave `server_optimizer` out.",
        checked_by="RobustAggregation.check_exchange",
    ),
    *LORA_RULES,
    # ---- Steps between local training and the aggregate
    Rule(
        f.ANY_STEP,
        f.NO_PARAMETERS,
        "the step works on parameters, but clients send none",
        "Leave `postprocessors` out.",
    ),
    Rule(
        f.ANY_STEP,
        f.PREDICTIONS_ONLY,
        "the step works on parameters, but clients send predictions and no parameters",
        "Leave `postprocessors` out. To reduce the size of the predictions, set `prediction_dtype` and `top_k` of the "
        "distillation.",
    ),
    Rule(
        f.ENCODES,
        f.OWN_ENCODING,
        "the method encodes the exchanged parameters itself",
        "Leave the postprocessor out.",
    ),
    Rule(
        f.EXCHANGE_DTYPE,
        f.OWN_STEPS,
        "the method encodes the exchanged parameters itself",
        "Leave `exchange_dtype` out.",
    ),
    Rule(
        f.ANOMALIES,
        f.NO_PARAMETERS,
        "the report compares parameters, but clients keep their parameters",
        "Leave `report_anomalies` and AnomalyReport out.",
    ),
    Rule(
        f.ANOMALIES,
        f.PREDICTIONS_ONLY,
        "the report compares parameters, but clients keep their parameters",
        "Leave `report_anomalies` and AnomalyReport out.",
    ),
    *CODEC_RULES,
    # ---- Collectors
    Rule(
        f.NOT_LATE,
        f.OPEN_REQUESTS,
        "the method needs all updates in their round",
        "Set collector='synchronous'.",
    ),
    Rule(
        f.LATE_DISTILLATION,
        f.OPEN_REQUESTS,
        "the distillation needs all updates in their round",
        "Set collector='synchronous'.",
    ),
    Rule(
        f.DEADLINE,
        f.OPEN_REQUESTS,
        "the requests stay open after a round",
        "Leave `round_deadline` out.",
    ),
    Rule(
        f.EVALUATE_CLIENTS,
        f.OPEN_REQUESTS,
        "the evaluation would ask clients that still train",
        "Leave `evaluate_clients` out, and evaluate the clients after the training.",
    ),
    Rule(
        f.OPEN_REQUESTS,
        f.NO_OPEN_REQUESTS,
        "the requests stay open after a round, but ranks agree on one round at a time",
        "Use one process, or clients on other machines.",
    ),
    # ---- Engines and launches
    Rule(
        f.REFUSED_ENGINE,
        f.ANY_ENGINE,
        "the method names the reason",
        "Use the engine that the method names.",
        checked_by="Method.check_engine",
    ),
    Rule(
        f.LOCAL,
        f.PROCESSES,
        "the engine runs in one process",
        "Leave `engine` out, or pass RankEngine().",
        checked_by="LocalEngine.check_launch",
    ),
    Rule(
        f.REMOTE,
        f.PROCESSES,
        "the engine runs in one process",
        "Start the server without a launcher.",
        checked_by="NetworkEngine.check_launch",
    ),
    Rule(
        f.PRIVATE_MODELS,
        f.DATA_PARALLEL,
        "several processes cannot train a private model together",
        "Set parallelism='clients'.",
    ),
    Rule(
        f.CLIENT_PROCESSES,
        f.CLIENT_PARALLEL,
        "the processes train one client",
        "Set parallelism='data', or start the client without a launcher.",
        checked_by="JoinedClient",
    ),
    Rule(
        f.STREAM,
        f.DATA_PARALLEL,
        "several processes cannot read a stream together",
        "Set parallelism='clients'.",
    ),
    Rule(
        f.DIFFERENT_NOISE,
        f.PROCESSES,
        "each process would draw different noise",
        "Set reproducible=True, or use one process.",
    ),
    *SHARDING_RULES,
    # ---- Secure aggregation: the server learns sums only
    Rule(
        f.SECURE_AGGREGATION,
        f.ANY_DISTILLATION,
        "the server reads the predictions or the model of each client",
        "Leave `distillation` out.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.NO_PARAMETERS,
        "clients send no parameters to add",
        "Leave `secure_aggregation` out.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.NOT_A_SUM,
        "the server reads the update of each client",
        "Use a method of sums, such as aggregation='fedavg'. `max_update_ratio` then bounds the sum.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.OWN_MESSAGES,
        "the replies of single clients can show more than a sum",
        "Use a method without `messages`, such as aggregation='fedavg'.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.OWN_STATES,
        "the clients of a sum start from the same state",
        "Use a method that sends one state to all clients, such as aggregation='fedavg'.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.READS_UPDATES,
        "the server has no update of a single client to read",
        "Override `accumulate` and `check_extra`, which clients call.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.ENCODES,
        "the server cannot decode the updates in a sum",
        "Leave the postprocessor out, and set bits=16 in `secure_aggregation_kwargs` for a smaller upload.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.ADDS_NOISE,
        "the noise of single clients is not part of the protocol",
        "Leave the postprocessor out.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.BALANCE,
        "the server does not know the numbers of examples",
        "Set `max_rows_per_round`.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.EVALUATE_CLIENTS,
        "the server would learn the metrics of single clients",
        "Pass an `eval_dataset` of the server.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.LOG_CLIENTS,
        "the server does not know the metrics of single clients",
        "Leave `log_clients` out.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.ANOMALIES,
        "the server does not know the updates of single clients",
        "Set `max_update_ratio`, which bounds the sum.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.OTHER_COLLECTOR,
        "the protocol collects the updates itself",
        "Set collector='synchronous'.",
    ),
    Rule(
        f.NO_MASKS,
        f.REMOTE,
        "the server would learn the update of each client",
        "Leave `masks` out of `secure_aggregation_kwargs`.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.CLIENT_PROCESSES,
        "the secrets of a client exist in one process",
        "Start the client without a launcher.",
        checked_by="JoinedClient",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.SPLIT,
        "a split model exchanges hidden states and gradients, which are not added",
        "Set `encryption` of SplitConfig.",
        checked_by="SplitFederatedTrainer",
    ),
    # ---- Examples and training arguments
    Rule(
        f.STREAM,
        f.BALANCE,
        "the number of examples of a stream is unknown",
        "To limit the training, leave `balance` out and set `local_steps`.",
    ),
    Rule(
        f.STREAM,
        f.MAX_ROWS,
        "the number of examples of a stream is unknown",
        "To limit the training, leave `max_rows_per_round` out and set `local_steps`.",
    ),
    Rule(
        f.STREAM,
        f.INITIAL_MODEL,
        "the method compares all examples of a client with the public examples",
        "Pass a Dataset, or use distillation='feddf', which compares none.",
    ),
    Rule(
        f.STREAM,
        f.COUNTS_CLASSES,
        "the examples of a stream are not known before they are read",
        "Pass a Dataset. FedKD needs no counts with weighting='size'.",
    ),
    Rule(
        f.FLOAT16,
        f.PRIVATE_MODELS,
        "the method computes gradients that no scaler protects from underflow in float16",
        "Use bf16=True.",
    ),
    Rule(
        f.FLOAT16,
        f.UNSCALED_GRADIENTS,
        "the method computes gradients that no scaler protects from underflow in float16",
        "Use bf16=True.",
    ),
    Rule(
        f.STREAM,
        f.LIST_BATCHES,
        "the trainers with such batches shuffle and repeat a stream themselves, so the position of a client in its "
        "stream is unknown",
        "Pass a Dataset.",
    ),
    Rule(
        f.READS_BATCHES,
        f.LIST_BATCHES,
        "the method reads the tensors of a batch by name",
        "Use a method that works on parameters or gradients, such as aggregation='fedavg' or 'fedprox'.",
    ),
    Rule(
        f.NO_GRADIENTS,
        f.NEEDS_GRADIENTS,
        "the optimizer keeps no gradients, which the method reads",
        "Use an optimizer that keeps the gradients until its step, such as 'adamw_torch'.",
    ),
    Rule(
        f.NOT_SGD,
        f.FEDNOVA,
        "FedNova computes its normalizer for SGD",
        "Set optim='sgd'.",
        checked_by="FedNova.check_setup",
    ),
    Rule(
        f.CARRIED_MOMENTUM,
        f.FEDNOVA,
        "FedNova with momentum needs a fresh client optimizer in each round",
        "Set client_optimizer_state='reset'.",
        checked_by="FedNova.check_setup",
    ),
)
