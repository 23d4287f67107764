//! URLs of stores. Credentials come from the environment, and never from the URL.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use crate::Result;
use crate::error::{RemoteError, known_mistake, redacted};
use crate::store::StoreUsage;

/// A store, and the path in it under which the snapshots are.
pub(crate) type StorePlace = (Arc<dyn ObjectStore>, Path);

/// Opens the store that a URL names.
pub(crate) fn open(text: &str, usage: StoreUsage) -> Result<StorePlace> {
    // The URL may hold a password, so an error shows it only after this check.
    let wrong = |why: &str| RemoteError::Url { url: shown(text), why: why.to_owned() };
    let url = Url::parse(text).map_err(|_| wrong(FORMS))?;
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(wrong("it has a user, a password or parameters; give credentials in the environment"));
    }
    let prefix = Path::from_url_path(url.path().trim_matches('/')).map_err(|error| wrong(&error.to_string()))?;
    let has_bucket = url.host_str().is_some_and(|host| !host.is_empty());
    let failed = |error: object_store::Error| match known_mistake(&error) {
        Some(cause) => RemoteError::Unusable { url: shown(text), cause: cause.to_owned() },
        None => wrong(&redacted(&error.to_string())),
    };
    match url.scheme() {
        "file" => {
            let path = url.to_file_path().map_err(|()| wrong("write file:///DIRECTORY"))?;
            return directory(path, usage).map(|store| (store, Path::default()));
        }
        _ if !has_bucket => return Err(wrong(FORMS)),
        _ => {}
    }
    // Fails if a provider is installed already, which then serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // A part may take long on a slow line. A server that is silent for this time has failed.
    let timeout = "300s";
    let store: Arc<dyn ObjectStore> = match url.scheme() {
        "http" | "https" if usage == StoreUsage::Object => {
            let options = ClientOptions::new().with_timeout(OBJECT_TIMEOUT).with_allow_http(true);
            let builder = HttpBuilder::new()
                .with_url(url.origin().ascii_serialization())
                .with_retry(retries())
                .with_client_options(options);
            Arc::new(builder.build().map_err(failed)?)
        }
        "s3" | "s3a" => {
            let mut builder = AmazonS3Builder::from_env();
            if std::env::var_os("AWS_TIMEOUT").is_none() {
                builder = builder.with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), timeout);
            }
            Arc::new(builder.with_url(text).with_retry(retries()).build().map_err(failed)?)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env()
                .with_config(GoogleConfigKey::Client(ClientConfigKey::Timeout), timeout);
            Arc::new(builder.with_url(text).with_retry(retries()).build().map_err(failed)?)
        }
        "az" | "azure" | "abfs" | "abfss" => {
            let builder = MicrosoftAzureBuilder::from_env()
                .with_config(AzureConfigKey::Client(ClientConfigKey::Timeout), timeout);
            Arc::new(builder.with_url(text).with_retry(retries()).build().map_err(failed)?)
        }
        _ => return Err(wrong(FORMS)),
    };
    Ok((store, prefix))
}

/// The directory that a URL names, if it names one.
pub(crate) fn directory_of(text: &str) -> Option<PathBuf> {
    Url::parse(text).ok().filter(|url| url.scheme() == "file")?.to_file_path().ok()
}

/// Opens a directory. Its last name is made if snapshots are to be written.
fn directory(path: PathBuf, usage: StoreUsage) -> Result<Arc<dyn ObjectStore>> {
    if usage == StoreUsage::Write && !path.exists() {
        let made = std::fs::create_dir(&path);
        made.map_err(|source| RemoteError::Host { what: format!("make the directory {}", path.display()), source })?;
    }
    let opened = LocalFileSystem::new_with_prefix(&path);
    let opened = opened.map_err(|error| RemoteError::Url {
        url: path.display().to_string(),
        why: format!("it cannot be opened as a directory: {error}"),
    })?;
    // A snapshot that was pushed survives a power cut.
    Ok(Arc::new(opened.with_fsync(true)))
}

/// How long a request for a range of an object may take. It is repeated then.
const OBJECT_TIMEOUT: Duration = Duration::from_secs(15);

/// `objects` repeats requests too. So the store's own client repeats only what fails for a moment.
fn retries() -> RetryConfig {
    RetryConfig { backoff: BackoffConfig::default(), max_retries: 3, retry_timeout: Duration::from_secs(60) }
}

/// A URL without user, password and parameters.
fn shown(text: &str) -> String {
    let text = text.split(['?', '#']).next().unwrap_or_default();
    match text.split_once("://") {
        Some((scheme, rest)) => {
            let end = rest.find('/').unwrap_or(rest.len());
            let host = rest[..end].rfind('@').map_or(0, |at| at + 1);
            format!("{scheme}://{}", &rest[host..])
        }
        None => text.to_owned(),
    }
}

const FORMS: &str = "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_without_a_store_are_refused_without_their_secrets() {
        for text in [
            "dir",
            "s3://",
            "http://host/x",
            "s3://key:hunter22@bucket/x",
            "s3://bucket/x?token=hunter22",
            "s3://bucket/x#hunter22",
            "file://host/dir?hunter22",
        ] {
            let error = open(text, StoreUsage::Read).unwrap_err().to_string();
            assert!(!error.contains("hunter22"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
