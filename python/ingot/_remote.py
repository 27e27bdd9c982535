"""How remote files are reached."""

from __future__ import annotations

from typing import TypedDict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from os import PathLike


class StorageOptions(TypedDict, total=False):
    """What `storage_options` may hold. All of it is optional.

    Nothing of it is shown in errors. Tokens, headers and keys go to the host that the URL names and to no
    other, wherever that redirects to. A line end at the end of one, as files have it, is taken away; one with
    any other control character is an `OptionError`.
    """

    #: Sent as ``Authorization: Bearer …``. By default, and with True, the Hub's token for files of the Hub
    #: (``HF_TOKEN``, ``HUGGING_FACE_HUB_TOKEN``, the file that its clients keep), that of
    #: ``GOOGLE_OAUTH_ACCESS_TOKEN`` for Google's store, or one that is issued for the service account or the
    #: person of the file ``GOOGLE_APPLICATION_CREDENTIALS``, and none for others. False sends none.
    token: str | bool | None
    #: Headers to send besides.
    headers: dict[str, str]
    #: Seconds for a connection to come about, through a proxy too; 10 by default.
    connect_timeout: float
    #: Seconds after which a server is given up that sends nothing, or less than `min_rate`; 30 by default.
    stall_timeout: float
    #: Seconds for one request of up to 8 MiB with all that is tried again, 600 by default.
    timeout: float
    #: Bytes per second, 1,024 by default.
    min_rate: int
    #: How often a request is tried again that failed for a reason that may pass; 4 times by default.
    retries: int
    #: Certificates in PEM to trust instead of the system's, for servers and for proxies of ``https:``.
    ca_file: str | PathLike[str]
    #: Follow redirects to other hosts and ports outside of the public internet too: on this machine, in
    #: private networks, the services of a cloud. False by default.
    allow_private_redirects: bool
    #: Where the service is: S3 (``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` by default), the Hub
    #: (``HF_ENDPOINT``), Google (``STORAGE_EMULATOR_HOST``) or Azure (``AZURE_STORAGE_ENDPOINT``).
    endpoint: str
    #: The region of the bucket; ``AWS_REGION``, ``AWS_DEFAULT_REGION``, that of the profile or ``us-east-1``.
    region: str
    #: Whether the bucket stands in the path of the URL, as MinIO wants it, or in the host. In the path by
    #: default where there is an endpoint.
    path_style: bool
    #: Send no credentials, whatever the environment holds.
    anonymous: bool
    #: The keys of S3. By default those of ``AWS_ACCESS_KEY_ID`` and the variables beside it, else those of
    #: the profile ``AWS_PROFILE`` in the files of Amazon's tools, else what Amazon issues for a while: to a
    #: pod with ``AWS_WEB_IDENTITY_TOKEN_FILE`` and ``AWS_ROLE_ARN``, to a container with
    #: ``AWS_CONTAINER_CREDENTIALS_RELATIVE_URI`` or ``…_FULL_URI``, and to a machine of EC2 with a role. The
    #: last is asked for a second, only where the firmware says that it is one or
    #: ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` is set, and not with ``AWS_EC2_METADATA_DISABLED``. Else none.
    access_key_id: str
    secret_access_key: str
    session_token: str
    #: The account of Azure (``AZURE_STORAGE_ACCOUNT_NAME``), and what opens it: its key
    #: (``AZURE_STORAGE_ACCOUNT_KEY``) or a signed query (``AZURE_STORAGE_SAS_TOKEN``).
    account: str
    account_key: str
    sas_token: str


OPTIONS = tuple(StorageOptions.__annotations__)
