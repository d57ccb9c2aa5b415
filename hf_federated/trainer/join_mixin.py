"""`JoinMixin`: the methods with which a trainer takes part in a federation whose server is on another machine."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext

from transformers.trainer_utils import TrainOutput

from ..secure_aggregation.credentials import Credentials
from ..transport import Connector, GrpcConnection
from ..transport.protocol import DEFAULT_MAX_MESSAGE_BYTES
from .base import RoleMixin
from .client_credentials import client_credentials
from .join import JoinedClient
from .output_lock import output_dir_lock


class JoinMixin(RoleMixin):
    """A trainer that can be one client of a federation over a network."""

    @abstractmethod
    def _train_rounds(
        self, resume_from_checkpoint: str | bool | None, trial: object, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        """Run the loop over rounds."""

    def join(
        self,
        address: str,
        *,
        client_id: str,
        certificates: str | None = None,
        insecure: bool = False,
        state_dir: str | None = None,
        connect_timeout: float = 600.0,
        reconnect_timeout: float = 45.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        refusals: int = 3,
        fingerprints: Mapping[str, str] | None = None,
    ) -> TrainOutput:
        """
        Take part in a federation as one client, until its server ends the run.

        Build the trainer with the arguments of the server's trainer and with the examples of this client. The batch
        size, the precision and the device may differ. A step of the training loop is a round in which this client
        trains, so callbacks, trackers and the progress bar work as in `train()`. The model ends with the parameters of
        the last message.

        The client keeps its state after each reply in `state_dir`. If it is killed, join again with the same folder:
        the client continues with the message that it had not answered.

        A client may be a launch of several processes, which call this method together. With `parallelism="data"`, they
        train as in any training with accelerate. The main process communicates with the server and writes the states,
        which all processes must be able to read. If a process fails, all of them end with an error.

        Args:
            address (`str`): Address of the server, as `host:port`.
            client_id (`str`): Id of the client, as in its certificate.
            certificates (`str`, *optional*): Folder with the certificates of the client, from `hf-federated
                certificates`. `None` requires `insecure=True`.
            insecure (`bool`, *optional*, defaults to `False`): Whether to use no TLS. Allowed on a loopback address
                only.
            state_dir (`str`, *optional*): Folder of the states. Defaults to `client_states` in the output directory.
            connect_timeout (`float`, *optional*, defaults to `600`): Seconds to try to connect.
            reconnect_timeout (`float`, *optional*, defaults to `45`): Seconds without a sign of the server after which
                the connection ends.
            max_message_bytes (`int`, *optional*, defaults to 1 GiB): Size of the largest message that the server may
                send.
            refusals (`int`, *optional*, defaults to `3`): Number of refused requests after which the client leaves. A
                client refuses requests that its own arguments do not allow.
            fingerprints (`Mapping[str, str]`, *optional*): Fingerprints of the certificates of the other clients by
                client id, for secure aggregation. The certificates of other clients in `certificates` are known, too.

        Raises:
            ClientRefusedError: If the server refuses the client. The message names the settings that differ.
            LinkError: If the connection ended. Join again to continue.
            RunEndedError: If the server ended the run because of an error.
            ServerRefusedError: If the client refused several requests of the server.
            OutputDirInUseError: If another process trains in the output directory, or uses `state_dir`.
            PeerFailedError: If another process of the launch failed.
            ValueError: If the launch has several processes and `parallelism` is not `"data"`, or if the trainer has
                the examples of several clients and `client_id` is none of them.
        """
        connect = functools.partial(
            GrpcConnection,
            address,
            certificates,
            client_id,
            insecure=insecure,
            connect_timeout=connect_timeout,
            reconnect_timeout=reconnect_timeout,
            max_message_bytes=max_message_bytes,
        )
        protocol = self._federation_setup.secure_aggregation
        credentials = client_credentials(protocol, client_id, certificates, fingerprints)
        return self.join_over(
            connect, client_id=client_id, state_dir=state_dir, refusals=refusals, credentials=credentials
        )

    def agreement(
        self, client_id: str, *, certificates: str | None = None, fingerprints: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """
        Return what this client agrees to when it joins, without a connection.

        The client refuses a request that asks for more, and a server with other settings. [`~JoinMixin.join`] also
        writes the agreement to `agreement.json` in `state_dir`.

        Args:
            client_id (`str`): As in [`~JoinMixin.join`].
            certificates (`str`, *optional*): As in [`~JoinMixin.join`]. With it, the agreement lists the clients whose
                signatures this client trusts under secure aggregation.
            fingerprints (`Mapping[str, str]`, *optional*): As in [`~JoinMixin.join`].

        Returns:
            `dict[str, str]`: Limits and settings, by topic.
        """
        setup, credentials = self._federation_setup, None
        if certificates is not None or fingerprints:
            credentials = client_credentials(setup.secure_aggregation, client_id, certificates, fingerprints)
        return JoinedClient(setup, self.args, client_id, None, credentials=credentials).describe_agreement()

    def join_over(
        self,
        connector: Connector,
        *,
        client_id: str,
        state_dir: str | None = None,
        refusals: int = 3,
        credentials: Credentials | None = None,
    ) -> TrainOutput:
        """
        Take part in a federation as [`~JoinMixin.join`], over another transport.

        Args:
            connector ([`~hf_federated.transport.Connector`]): Connects to the server. The client calls it again when
                the connection is lost.
            client_id (`str`): As in [`~JoinMixin.join`].
            state_dir (`str`, *optional*): As in [`~JoinMixin.join`].
            refusals (`int`, *optional*, defaults to `3`): As in [`~JoinMixin.join`].
            credentials ([`~hf_federated.secure_aggregation.credentials.Credentials`], *optional*): The identity of the
                client, and the fingerprints of the other clients, for secure aggregation. By default, the client
                generates a key, which pins='none' allows.

        Raises:
            RunEndedError: If the server ended the run because of an error.
            ServerRefusedError: If the client refused several requests of the server.
            OutputDirInUseError: If another process trains in the output directory.
            ValueError: As in [`~JoinMixin.join`].
        """
        setup = self._federation_setup
        setup.processes.raise_if_failed()
        if credentials is None:
            credentials = client_credentials(setup.secure_aggregation, client_id, None, None)
        joined = JoinedClient(setup, self.args, client_id, state_dir, refusals, credentials)
        with (
            setup.processes.fail_together(),
            output_dir_lock(self.args.output_dir, setup.processes),
            # Two clients with one journal would not know the consents of each other.
            nullcontext() if state_dir is None else output_dir_lock(state_dir, setup.processes, "state_dir"),
        ):
            joined.connect(connector)
            self._setup, self._joined, args = joined.setup, joined, self.args
            try:
                self.args = joined.loop_arguments(args)
                return self._train_rounds(None, None, None)
            finally:
                self._setup, self._joined, self.args = setup, None, args
                joined.close()
