//! `ubtrfs edit IMAGE SCRIPT` and `ubtrfs shell IMAGE`: several commands on one image.
//!
//! - `line`: the words of a line, and paths in the image.
//! - `edit`: all commands of a script, or none.
//! - `shell`: a prompt.
//! - `complete`: the completions of the prompt.

mod complete;
mod edit;
mod line;
mod shell;

pub(crate) use edit::{EditArgs, run_edit};
pub(crate) use shell::{ShellArgs, run_shell};

/// The help on lines.
const LINES_HELP: &str = "In each line, ':PATH' is a path in the image: ':/etc', or ':etc' in the directory of the last \
'cd :DIR'. All other words are as on the command line of ubtrfs, and are quoted as in a shell: cp 'my file' :/etc/ . \
A line that begins with # is a comment.";
