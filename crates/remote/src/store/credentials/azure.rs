//! Identities of Azure for which a token is issued: its SDK requests it.

use super::source::{Source, delegated};
use super::{firmware_says, set};
use crate::credentials::{Secret, Variable, Wanted};
use crate::fault::Fault;
use crate::options::RemoteOptions;

/// What the firmware of all machines of Azure says.
const ASSET_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

/// The variables that configure an application, a pod, an app or a machine, in the order of the SDK.
const VARIABLES: &[&str] = &[
    "AZURE_CLIENT_SECRET",
    "AZURE_CLIENT_CERTIFICATE_PATH",
    "AZURE_FEDERATED_TOKEN_FILE",
    "IDENTITY_ENDPOINT",
    "MSI_ENDPOINT",
    "AZURE_POD_IDENTITY_AUTHORITY_HOST",
];

/// The application whose secret is among the options.
pub(crate) fn of_client_secret(options: &RemoteOptions, variable: Variable<'_>) -> Result<Source, Fault> {
    delegated(options, wanted("client_secret", options, variable))
}

/// The first that the environment names, the managed identity that the options name, or the machine's.
pub(crate) fn of_environment(
    options: &RemoteOptions,
    variable: Variable<'_>,
) -> Result<Option<Source>, Fault> {
    let named = VARIABLES.iter().find(|name| set(variable, &[name]).is_some());
    let source = match named {
        Some(name) => name,
        None if options.client_id.is_some() => "client_id",
        None if firmware_says("chassis_asset_tag", ASSET_TAG) => {
            "the metadata service of this machine (not asked with `anonymous`)"
        }
        None => return Ok(None),
    };
    delegated(options, wanted(source, options, variable)).map(Some)
}

fn wanted(source: &str, options: &RemoteOptions, variable: Variable<'_>) -> Wanted {
    let others = ["AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_AUTHORITY_HOST"];
    let held = |name: &&str| Secret::new(variable(name).unwrap_or_default());
    Wanted {
        client_id: options.client_id.clone(),
        tenant_id: options.tenant_id.clone(),
        client_secret: options.client_secret.clone(),
        state: VARIABLES.iter().chain(&others).map(held).collect(),
        ..Wanted::new("az", source)
    }
}
