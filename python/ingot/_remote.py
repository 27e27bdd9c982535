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

    #: Sent as ``Authorization: Bearer …``; beside an `access_key_id` of S3, its `session_token`. By default,
    #: and with True, what the environment has for the kind of URL (docs/credentials.md). False sends none.
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
    #: Where the service is: S3 (``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL`` or that of the profile by
    #: default), the Hub (``HF_ENDPOINT``), Google (``STORAGE_EMULATOR_HOST``) or Azure
    #: (``AZURE_STORAGE_ENDPOINT``).
    endpoint: str
    #: The region of the bucket; ``AWS_REGION``, ``AWS_DEFAULT_REGION``, that of the profile or ``us-east-1``.
    region: str
    #: Whether the bucket stands in the path of the URL, as MinIO wants it, or in the host. In the path by
    #: default where there is an endpoint.
    path_style: bool
    #: Send no credentials, whatever the environment holds.
    anonymous: bool
    #: The keys of S3, or HMAC keys of Google's store.
    access_key_id: str
    secret_access_key: str
    session_token: str
    #: The profile of ``~/.aws/config`` and ``~/.aws/credentials`` that is used instead of what the
    #: environment holds; ``AWS_PROFILE`` by default.
    profile: str
    #: Pay for what is read, as some buckets of S3 ask of whoever reads; ``AWS_REQUEST_PAYER`` by default.
    request_payer: bool
    #: A JSON file of credentials of Google: of a service account, a person, an external account.
    credentials_file: str | PathLike[str]
    #: The account of Azure (``AZURE_STORAGE_ACCOUNT_NAME``), and what opens it: its key, a signed query, or
    #: all of these in one text.
    account: str
    account_key: str
    sas_token: str
    connection_string: str
    #: The application of Azure that reads, with its directory and its secret; `client_id` alone names a
    #: managed identity.
    client_id: str
    tenant_id: str
    client_secret: str


#: The other names that `storage_options` takes, in small letters or large: those of s3fs, gcsfs and adlfs,
#: and of object_store with all that is built on it.
OTHER_NAMES = {
    "access_key_id": "key username aws_access_key_id",
    "secret_access_key": "secret password aws_secret_access_key",
    "session_token": "aws_session_token aws_token",
    "token": "bearer_token google_bearer_token azure_storage_token",
    "region": "region_name aws_region default_region aws_default_region",
    "endpoint": "endpoint_url aws_endpoint aws_endpoint_url aws_endpoint_url_s3 base_url google_base_url "
    "azure_endpoint azure_storage_endpoint",
    "request_payer": "requester_pays aws_request_payer",
    "profile": "aws_profile",
    "anonymous": "anon skip_signature aws_skip_signature google_skip_signature azure_skip_signature",
    "credentials_file": "service_account service_account_path google_service_account "
    "google_service_account_path application_credentials google_application_credentials",
    "account": "account_name azure_storage_account_name",
    "account_key": "access_key master_key azure_storage_account_key azure_storage_access_key "
    "azure_storage_master_key",
    "sas_token": "sas_key azure_storage_sas_key azure_storage_sas_token",
    "connection_string": "azure_storage_connection_string",
    "client_id": "azure_client_id azure_storage_client_id",
    "tenant_id": "authority_id azure_tenant_id azure_authority_id azure_storage_tenant_id "
    "azure_storage_authority_id",
    "client_secret": "azure_client_secret azure_storage_client_secret",
    "headers": "default_headers",
    "ca_file": "root_certificate",
    # What says the same in other words: True where the bucket stands in the host; "path" or "virtual"; the
    # host of an endpoint; whether an endpoint may be one of http://; True, or a `ca_file`; more options.
    "virtual_hosted_style_request": "aws_virtual_hosted_style_request",
    "addressing_style": "",
    "account_host": "",
    "allow_http": "aws_allow_http",
    "verify": "",
    "client_kwargs": "config_kwargs s3 client_options",
}

OPTIONS = tuple(StorageOptions.__annotations__)
#: Which option each name is.
NAMES = {name: name for name in (*OPTIONS, *OTHER_NAMES)} | {
    other: name for name, others in OTHER_NAMES.items() for other in others.split()
}
