//! Tokens for Azure, which its SDK requests.

use super::firmware_says;
use super::source::{Source, delegated};
use crate::credentials::Wanted;
use crate::environment::Environment;
use crate::fault::Result;
use crate::options::RemoteOptions;

/// The asset tag in the firmware of all machines of Azure.
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

/// Other variables that the identity depends on.
const OTHERS: &[&str] = &["AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_AUTHORITY_HOST"];

/// Return the application whose secret is in the options.
pub(crate) fn of_client_secret(options: &RemoteOptions, environment: Environment<'_>) -> Result<Source> {
    delegated(options, wanted("client_secret", options, environment))
}

/// Return the first identity in the environment, the managed identity in the options, or the machine's identity.
pub(crate) fn of_environment(
    options: &RemoteOptions,
    environment: Environment<'_>,
) -> Result<Option<Source>> {
    let named = VARIABLES.iter().find(|name| environment.get(&[name]).is_some());
    let source = match named {
        Some(name) => name,
        None if options.client_id.is_some() => "client_id",
        None if firmware_says("chassis_asset_tag", ASSET_TAG) => {
            "the metadata service of this machine (not used with `anonymous`)"
        }
        None => return Ok(None),
    };
    delegated(options, wanted(source, options, environment)).map(Some)
}

fn wanted(source: &str, options: &RemoteOptions, environment: Environment<'_>) -> Wanted {
    Wanted {
        client_id: options.client_id.clone(),
        tenant_id: options.tenant_id.clone(),
        client_secret: options.client_secret.clone(),
        state: [environment.values(VARIABLES), environment.values(OTHERS)].concat(),
        ..Wanted::new("az", source)
    }
}
