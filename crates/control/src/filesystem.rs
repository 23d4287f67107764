//! Commands on the filesystem as a whole.
//!
//! | command     | needs                                                       |
//! |-------------|-------------------------------------------------------------|
//! | sync        | nothing but a file of the filesystem                        |
//! | stats       | nothing but a file of the filesystem                        |

use serde::{Deserialize, Serialize};

use crate::execute::Context;
use crate::failure::Result;

/// A command on the filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Makes everything written so far durable.
    Sync,
    /// The counters since the mount: [`Response::Stats`].
    Stats,
}

/// The result of a command on the filesystem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// It is done.
    Done,
    /// Counters as text for Prometheus.
    Stats(String),
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        false
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        false
    }
}

pub(crate) fn execute(context: &Context<'_>, request: Request) -> Result<Response> {
    match request {
        Request::Sync => {
            context.fs.sync()?;
            context.host.note_sync();
            Ok(Response::Done)
        }
        Request::Stats => Ok(Response::Stats(context.fs.metrics_text() + &context.host.stats())),
    }
}
