//! Who a caller is to Azure, where a token is issued for that: to an application, a pod or a machine.

use super::asker::form;
use super::token::{Field, Question, TokenSource};
use super::{Variable, firmware_says, refused, safe_service, set};
use crate::fault::Fault;
use crate::options::{RemoteOptions, Secret, credential};
use crate::url::{Url, encode_segment};

/// What the token is for.
const RESOURCE: &str = "https://storage.azure.com/";

/// Where tokens are issued, if the environment does not say.
const AUTHORITY: &str = "https://login.microsoftonline.com";

/// Where machines ask.
const MACHINE_SERVICE: &str = "http://169.254.169.254";

/// What the firmware of all machines of Azure says.
const ASSET_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

/// A token for an application that has a secret, which `named_by` names.
pub(crate) fn of_client_secret(
    secret: &Secret,
    named_by: &str,
    options: &RemoteOptions,
    variable: Variable<'_>,
) -> Result<TokenSource, Fault> {
    let field = ("client_secret", Field::Text(secret.clone()));
    of_application(named_by, vec![field], options, variable)
}

/// The first that the environment names: the secret of an application, the token of a pod, or what an app or a machine of
/// Azure asks.
pub(crate) fn of_environment(
    options: &RemoteOptions,
    variable: Variable<'_>,
) -> Result<Option<TokenSource>, Fault> {
    let name = "AZURE_CLIENT_SECRET";
    if let Some(secret) = credential(variable, &[name])? {
        return of_client_secret(&secret, name, options, variable).map(Some);
    }
    let name = "AZURE_FEDERATED_TOKEN_FILE";
    if let Some(path) = set(variable, &[name]) {
        let kind = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
        let fields = vec![
            ("client_assertion_type", Field::text(kind)),
            ("client_assertion", Field::File(path.into(), None)),
        ];
        return of_application(name, fields, options, variable).map(Some);
    }
    managed(options, variable)
}

fn client(options: &RemoteOptions, variable: Variable<'_>) -> Option<String> {
    let given = options.client_id.clone();
    given.or_else(|| set(variable, &["AZURE_CLIENT_ID"]))
}

fn of_application(
    name: &str,
    mut fields: Vec<(&'static str, Field)>,
    options: &RemoteOptions,
    variable: Variable<'_>,
) -> Result<TokenSource, Fault> {
    let missing = |what: &str| refused(format!("{name} needs {what} beside it"));
    let tenant = options
        .tenant_id
        .clone()
        .or_else(|| set(variable, &["AZURE_TENANT_ID"]));
    let tenant = tenant.ok_or_else(|| missing("tenant_id, or AZURE_TENANT_ID,"))?;
    let client = client(options, variable).ok_or_else(|| missing("client_id, or AZURE_CLIENT_ID,"))?;
    let authority = set(variable, &["AZURE_AUTHORITY_HOST"]);
    let authority = authority.as_deref().unwrap_or(AUTHORITY).trim_end_matches('/');
    let service = format!("{authority}/{}/oauth2/v2.0/token", encode_segment(&tenant));
    fields.extend([
        ("grant_type", Field::text("client_credentials")),
        ("client_id", Field::text(client)),
        ("scope", Field::text(format!("{RESOURCE}.default"))),
    ]);
    let service = safe_service(&service, "AZURE_AUTHORITY_HOST")?;
    Ok(TokenSource::form(name, service, fields))
}

/// The identity of an app, or of the machine.
fn managed(options: &RemoteOptions, variable: Variable<'_>) -> Result<Option<TokenSource>, Fault> {
    let client = client(options, variable);
    let (name, endpoint, header, version) = if let Some(endpoint) = set(variable, &["IDENTITY_ENDPOINT"]) {
        let header = credential(variable, &["IDENTITY_HEADER"])?;
        let header = header.ok_or_else(|| refused("IDENTITY_ENDPOINT needs IDENTITY_HEADER beside it"))?;
        let endpoint = safe_service(&endpoint, "IDENTITY_ENDPOINT")?;
        (
            "IDENTITY_ENDPOINT",
            endpoint,
            ("X-IDENTITY-HEADER", header),
            "2019-08-01",
        )
    } else {
        let host = set(variable, &["AZURE_POD_IDENTITY_AUTHORITY_HOST"]);
        let host = host
            .or_else(|| firmware_says("chassis_asset_tag", ASSET_TAG).then(|| MACHINE_SERVICE.to_owned()));
        let Some(host) = host else {
            return Ok(None);
        };
        let endpoint = Url::parse(&format!(
            "{}/metadata/identity/oauth2/token",
            host.trim_end_matches('/')
        ))?;
        let name = "the metadata service of this machine (not asked with `anonymous`)";
        (name, endpoint, ("Metadata", Secret::new("true")), "2018-02-01")
    };
    let mut pairs = vec![("api-version", version), ("resource", RESOURCE)];
    pairs.extend(client.as_deref().map(|client| ("client_id", client)));
    Ok(Some(TokenSource {
        name: name.to_owned(),
        service: Url {
            query: Some(form(pairs)),
            ..endpoint
        },
        question: Question::Machine {
            header,
            // A machine without an identity; who names one means that one.
            nobody: if client.is_none() { &[400, 404] } else { &[] },
        },
        other_account: None,
    }))
}
