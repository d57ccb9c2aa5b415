"""`NVFlareServer` and `NVFlareClient`: a federation as a job of NVIDIA FLARE 2.9 (extra `nvflare`).

NVFlare starts the processes, provides the identities and carries the messages, over its Collab API: the server calls
the published method `handle` of the object of each client. The federation is the one of
[`~hf_federated.engines.NetworkEngine`], over a [`~hf_federated.transport.CallTransport`].

Subclass both classes in the file that the job ships, and pass the objects to `nvflare.collab.CollabRecipe`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from transformers.utils import logging

from ..transport import CallEndpoint, CallTransport, Connector
from ..utils.optional_packages import require_packages
from ..utils.printable import printable_traceback
from .network import NetworkEngine


logger = logging.get_logger(__name__)

# Seconds that the end of a job waits for the trainer of a client.
_STOP_SECONDS = 300.0
# Name of the server in the calls of NVFlare.
SERVER_NAME = "server"


def is_nvflare_installed() -> bool:
    """Whether NVFlare is installed."""
    return importlib.util.find_spec("nvflare") is not None


def require_nvflare(user: str) -> Any:
    """
    Import `nvflare.collab.collab` and return it.

    Args:
        user (`str`): Name of the class or command that needs NVFlare, for the error.

    Raises:
        ImportError: If `nvflare` is not installed. The message names the extra to install.
    """
    require_packages(user, {"nvflare": {"nvflare": "nvflare 2.9 or later, which runs on Linux"}})
    from nvflare.collab import collab

    return collab


class NVFlareServer(ABC):
    """
    Runs the rounds of a federation, as the server object of an NVFlare job.

    Args:
        clients (`Sequence[str]`): Ids of the clients. They are the names of the NVFlare sites.
        num_to_start (`int`, *optional*): Number of clients that must have joined before the first round. Defaults to
            all clients.
        join_timeout (`float`, *optional*, defaults to `600`): Seconds to wait for these clients.
        rejoin_timeout (`float`, *optional*, defaults to `60`): Seconds that a round without `round_deadline` waits for
            a lost client.
        call_timeout (`float`, *optional*, defaults to `60`): Seconds without a response after which a client is lost.
            It does not limit the duration of local training.
        resume (`bool`, *optional*, defaults to `False`): Whether to continue from the last checkpoint in the output
            directory.

    Example:

    ```python
    from hf_federated import FederatedTrainer
    from hf_federated.engines.nvflare import NVFlareServer


    class Server(NVFlareServer):
        def build_trainer(self, engine):
            return FederatedTrainer(model=..., args=..., federation=..., engine=engine)
    ```
    """

    def __init__(
        self,
        clients: Sequence[str],
        num_to_start: int | None = None,
        join_timeout: float = 600.0,
        rejoin_timeout: float = 60.0,
        call_timeout: float = 60.0,
        resume: bool = False,
    ) -> None:
        require_nvflare(type(self).__name__)
        # NVFlare reads the arguments from attributes with their names, and writes them to the job.
        self.clients = list(clients)
        self.num_to_start = num_to_start
        self.join_timeout = join_timeout
        self.rejoin_timeout = rejoin_timeout
        self.call_timeout = call_timeout
        self.resume = resume

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if is_nvflare_installed():
            main = require_nvflare(cls.__name__).main(NVFlareServer.main)
            cls.main = functools.wraps(NVFlareServer.main)(main)  # type: ignore[method-assign]

    @abstractmethod
    def build_trainer(self, engine: NetworkEngine) -> Any:
        """
        Build the trainer of the server.

        Args:
            engine ([`~hf_federated.engines.NetworkEngine`]): The `engine` of the trainer.
        """

    def run(self, trainer: Any) -> None:
        """
        Train. Override this method to do more than train and save the model.

        Args:
            trainer ([`FederatedTrainer`]): The trainer of `build_trainer`.
        """
        trainer.train(resume_from_checkpoint=self.resume)
        trainer.save_model()

    def build_engine(self) -> NetworkEngine:
        """Build an engine, which runs the clients of the job in one training."""
        from nvflare.collab import collab
        from nvflare.collab.api.exceptions import RunAborted

        context = collab.context
        num_to_start = self.num_to_start or len(self.clients)

        def check() -> None:
            if context.is_aborted():
                raise RunAborted("NVFlare ends the job.")
            # The process of a client is not restarted in a running job.
            if len(self.clients) - len(transport.failures) < num_to_start:
                reasons = "; ".join(f"{name!r}: {reason}" for name, reason in sorted(transport.failures.items()))
                raise RuntimeError(f"The run needs {num_to_start} clients, but these clients cannot join: {reasons}")

        calls = {proxy.name: functools.partial(_call, proxy) for proxy in collab.clients}
        transport = CallTransport(calls, call_timeout=self.call_timeout, check=check)
        return NetworkEngine(
            self.clients,
            num_to_start=num_to_start,
            join_timeout=self.join_timeout,
            rejoin_timeout=self.rejoin_timeout,
            transport=transport,
        )

    def main(self) -> None:
        """Run the job. NVFlare calls this method."""
        self.run(self.build_trainer(self.build_engine()))


def _call(proxy: Any, request: bytes, timeout: float) -> bytes:
    return proxy(timeout=timeout).handle(request)


class NVFlareClient(ABC):
    """
    Trains as a client of a federation, as the client object of an NVFlare job.

    Example:

    ```python
    from hf_federated import FederatedTrainer
    from hf_federated.engines.nvflare import NVFlareClient


    class Client(NVFlareClient):
        def build_trainer(self, client_id):
            return FederatedTrainer(model=..., args=..., federation=..., train_dataset=...)
    ```
    """

    def __init__(self) -> None:
        require_nvflare(type(self).__name__)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if is_nvflare_installed():
            collab = require_nvflare(cls.__name__)
            for name, decorator in (("start", collab.init), ("handle", collab.publish), ("stop", collab.final)):
                method = getattr(NVFlareClient, name)
                setattr(cls, name, functools.wraps(method)(decorator(method)))

    @abstractmethod
    def build_trainer(self, client_id: str) -> Any:
        """
        Build the trainer of a client, with the examples of the client.

        Args:
            client_id (`str`): Id of the client, which is the name of the NVFlare site.
        """

    def run(self, trainer: Any, connector: Connector, client_id: str) -> None:
        """
        Take part in the run until it ends. Override this method to save or evaluate the model afterwards.

        Args:
            trainer ([`FederatedTrainer`]): The trainer of `build_trainer`.
            connector ([`~hf_federated.transport.Connector`]): Connects to the server.
            client_id (`str`): Id of the client.
        """
        trainer.join_over(connector, client_id=client_id)

    def start(self) -> None:
        """Start the trainer in a thread. NVFlare calls this method."""
        from nvflare.collab import collab

        self._endpoint = CallEndpoint()
        arguments = [collab.context, collab.site_name]
        self._thread = threading.Thread(target=self._train, args=arguments, name="trainer", daemon=True)
        self._thread.start()

    def handle(self, request: bytes) -> bytes:
        """
        Answer a call of the server. NVFlare calls this method.

        Args:
            request (`bytes`): The call.

        Raises:
            PermissionError: If another client calls.
        """
        from nvflare.collab import collab

        # NVFlare also delivers calls between the clients of a job.
        if collab.caller != SERVER_NAME:
            raise PermissionError(f"Only the server calls this method, not {collab.caller!r}.")
        return self._endpoint.handle(request)

    def stop(self) -> None:
        """Wait for the trainer. NVFlare calls this method."""
        self._endpoint.close()
        self._thread.join(_STOP_SECONDS)

    def _train(self, context: Any, client_id: str) -> None:
        with context.app.new_context(client_id, client_id):
            try:
                self.run(self.build_trainer(client_id), self._endpoint.connect, client_id)
            except BaseException as error:
                logger.error(f"Client {client_id!r} ended.\n{printable_traceback(error)}")
                # The text of an error may contain paths and examples. It stays on the client.
                self._endpoint.fail(f"{type(error).__name__}. The log of the client has the details.")


def output_folder(output_dir: str) -> str:
    """
    Return an output directory that later jobs find again. The folder of a job would be deleted.

    Args:
        output_dir (`str`): Folder. A relative folder is in the workspace of the NVFlare site.
    """
    from nvflare.collab import collab

    return os.path.join(collab.workspace.get_root_dir(), output_dir)
