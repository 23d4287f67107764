//! [`RemoteError`]: what failed, on which object, and what to do.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::manifest::SnapshotKey;

/// A failure of work with an object store.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// A URL that names no store.
    #[error("'{url}' is not a place for snapshots: {why}")]
    Url {
        /// The URL, without secrets.
        url: String,
        /// The mistake, and the form to write.
        why: String,
    },
    /// A store that the environment does not let use.
    #[error("cannot use {url}: {cause}")]
    Unusable {
        /// The URL, without secrets.
        url: String,
        /// The missing variable, and the remedy.
        cause: String,
    },
    /// A request failed, also when it was repeated.
    #[error("cannot {verb} {object}: {cause}")]
    Request {
        /// `read`, `write`, `list` or `remove`.
        verb: &'static str,
        /// The object's name below the place in the store.
        object: String,
        /// The store's words, without secrets.
        cause: String,
        /// Whether the object does not exist.
        is_missing: bool,
    },
    /// An object does not hold what it should hold.
    #[error("{object} is damaged: {what}")]
    Damaged {
        /// The object's name below the place in the store.
        object: String,
        /// What differs.
        what: String,
    },
    /// A manifest of a later version of the format.
    #[error("{object} has version {found} of the format, and this program knows version {known}; use a newer ubtrfs")]
    Version {
        /// The manifest's name.
        object: String,
        /// Version of the manifest.
        found: u64,
        /// Version that this program knows.
        known: u64,
    },
    /// A manifest that cannot be trusted or read with the keys at hand.
    #[error("{object} {what}")]
    Keys {
        /// The manifest's name.
        object: String,
        /// The mistake, and the remedy.
        what: &'static str,
    },
    /// A key file that cannot be used.
    #[error("cannot use the keys: {0}")]
    KeyFile(String),
    /// A snapshot whose parent is not in the store.
    #[error(
        "snapshot {child} needs {parent}, which the store does not have; push a snapshot without it: ubtrfs push --full"
    )]
    NoParent {
        /// The snapshot.
        child: SnapshotKey,
        /// Its parent.
        parent: SnapshotKey,
    },
    /// Snapshots that are their own ancestors.
    #[error("snapshot {0} is its own ancestor: the manifests of the store were changed")]
    Circle(SnapshotKey),
    /// More objects than this program takes.
    #[error("{what} has more than {limit} {of}, the largest number that ubtrfs takes; {advice}")]
    TooMany {
        /// What has too many.
        what: String,
        /// The limit.
        limit: usize,
        /// What is counted.
        of: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// The stream could not be read or written.
    #[error("cannot {verb} the stream: {source}")]
    Stream {
        /// `read` or `write`.
        verb: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// An object is not the one that was opened any more.
    #[error("{url} has changed since it was opened; unmount it, or repeat the command")]
    Changed {
        /// The URL.
        url: String,
    },
    /// A server sends objects only as a whole.
    #[error("{url}: the server has no requests for ranges ({cause}); copy the image to this machine")]
    NoRanges {
        /// The URL.
        url: String,
        /// The store's words.
        cause: String,
    },
    /// A request takes too long.
    #[error("{url}: the server does not answer within {seconds} seconds; check the network")]
    Late {
        /// The URL.
        url: String,
        /// The limit.
        seconds: u64,
    },
    /// A failure that several readers share.
    #[error(transparent)]
    Shared(Arc<RemoteError>),
    /// Other work in the store excludes this.
    #[error(
        "another push or prune works in the store ({object}, {seconds} seconds old); repeat the command when it has ended. If it \
         was killed, its mark counts for ten minutes"
    )]
    Busy {
        /// The mark of the other work.
        object: String,
        /// Age of the mark.
        seconds: i64,
    },
    /// Too much time passed without a sign of this work in the store.
    #[error("the store was not reached for minutes, so others may have changed it meanwhile; repeat the command")]
    Away,
    /// The work was cancelled.
    #[error("interrupted")]
    Cancelled,
    /// This machine refused something.
    #[error("cannot {what}: {source}")]
    Host {
        /// What could not be done.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl RemoteError {
    pub(crate) fn damaged(object: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Damaged { object: object.into(), what: what.into() }
    }

    /// `url` did not answer within this time.
    pub(crate) fn late(url: &str, limit: Duration) -> Self {
        Self::Late { url: url.to_owned(), seconds: limit.as_secs() }
    }

    pub(crate) fn request(verb: &'static str, object: &str, cause: &object_store::Error) -> Self {
        let is_missing = matches!(cause, object_store::Error::NotFound { .. });
        let words = match cause {
            object_store::Error::NotFound { .. } => "it does not exist".to_owned(),
            object_store::Error::PermissionDenied { .. } => {
                "the store denies it; check the rights of the credentials".to_owned()
            }
            object_store::Error::Unauthenticated { .. } => NOT_ACCEPTED.to_owned(),
            other => known_mistake(other).map_or_else(|| chain_text(other), str::to_owned),
        };
        Self::Request { verb, object: object.to_owned(), cause: redacted(&words), is_missing }
    }

    /// Whether a repetition may succeed.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Request { is_missing, .. } => !is_missing,
            Self::Damaged { .. } => true,
            _ => false,
        }
    }

    /// Whether an object that was asked for does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Request { is_missing: true, .. })
    }
}

/// An error with its causes that add something.
fn chain_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        next = cause.source();
    }
    text.chars().take(MOST_CHARS).collect()
}

/// Removes what may be secret (P4): values of the environment's secrets, and parameters of URLs, which hold signatures.
pub(crate) fn redacted(text: &str) -> String {
    let is_secret = |name: &str| SECRET_WORDS.iter().any(|word| name.contains(word));
    let secrets: Vec<String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, value)| is_secret(&name.to_ascii_uppercase()) && value.len() >= SHORTEST_SECRET)
        .map(|(_, value)| value)
        .collect();
    without_parameters(&without(text, &secrets))
}

/// Replaces each of these words.
fn without(text: &str, secrets: &[String]) -> String {
    secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "***"))
}

/// Replaces the parameters of URLs.
fn without_parameters(text: &str) -> String {
    let word = |word: &str| match (word.find("://"), word.find('?')) {
        (Some(scheme), Some(at)) if scheme < at => format!("{}?***", &word[..at]),
        _ => word.to_owned(),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// The words for the error of a common mistake.
pub(crate) fn known_mistake(error: &object_store::Error) -> Option<&'static str> {
    let text = chain_text(error);
    KNOWN.iter().find(|(part, _)| text.contains(part)).map(|(_, words)| *words)
}

const NOT_ACCEPTED: &str = "the store does not accept the credentials; check the variables of the environment, such as \
                            AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";

/// Parts of errors of common mistakes, and the words for them.
const KNOWN: [(&str, &str); 8] = [
    (
        "Missing SecretAccessKey",
        "AWS_ACCESS_KEY_ID is in the environment, and AWS_SECRET_ACCESS_KEY is not; set it as well",
    ),
    (
        "Missing AccessKeyId",
        "AWS_SECRET_ACCESS_KEY is in the environment, and AWS_ACCESS_KEY_ID is not; set it as well",
    ),
    ("SignatureDoesNotMatch", NOT_ACCEPTED),
    ("InvalidAccessKeyId", NOT_ACCEPTED),
    ("NoSuchBucket", "the bucket does not exist; make it first, or check the URL"),
    // The service of a cloud that gives credentials to its own machines.
    (
        "169.254.169.254",
        "there are no credentials; set those of your store in the environment, such as AWS_ACCESS_KEY_ID and \
         AWS_SECRET_ACCESS_KEY",
    ),
    ("metadata.google.internal", "there are no credentials; let GOOGLE_SERVICE_ACCOUNT name the file with them"),
    (
        "URL scheme is not allowed",
        "its endpoint is not encrypted (http); to use it nevertheless, set AWS_ALLOW_HTTP=true",
    ),
];

const MOST_CHARS: usize = 600;
/// Shorter values are no secrets, and would be found in other words.
const SHORTEST_SECRET: usize = 6;
/// Names of variables of the environment that hold secrets contain one of these.
const SECRET_WORDS: [&str; 7] = ["SECRET", "TOKEN", "PASSWORD", "KEY", "SAS", "CREDENTIAL", "IDENTITY"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_mistakes_have_words_of_their_own() {
        let source = "403 Forbidden: <?xml><Code>SignatureDoesNotMatch</Code>".into();
        let error = object_store::Error::Generic { store: "S3", source };
        let shown = RemoteError::request("list", "snapshots", &error).to_string();
        assert!(shown.starts_with("cannot list snapshots: the store does not accept the credentials"), "{shown}");
    }

    #[test]
    fn secrets_do_not_appear_in_errors() {
        let text = "GET https://host/a?sig=abc&x=1 failed with topsecret (topsecret)";
        let shown = without_parameters(&without(text, &["topsecret".to_owned()]));
        assert_eq!(shown, "GET https://host/a?*** failed with *** (***)");
        assert_eq!(without_parameters("what? no http://host/"), "what? no http://host/");
    }
}
