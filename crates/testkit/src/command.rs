//! Runs system tools. A failed tool becomes an error that contains the tool's output.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Runs a tool. Returns the tool's standard output, or an error with the tool's status and all of its output.
///
/// mkfs.btrfs looks at every mount, and fails while the server of one is dead. Another test may have killed it, so
/// mkfs.btrfs is tried again.
pub fn run<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Result<String> {
    let args: Vec<S> = args.into_iter().collect();
    let once = || {
        let mut command = Command::new(program);
        command.args(&args).stdin(Stdio::null());
        finish(command, None)
    };
    for _ in 0..DEAD_MOUNT_TRIES {
        match once() {
            Err(error) if program == "mkfs.btrfs" && DEAD_MOUNT.iter().any(|text| error.to_string().contains(text)) => {
                std::thread::sleep(Duration::from_millis(100));
            }
            done => return done,
        }
    }
    once()
}

/// The texts of the errors of a path in a mount whose server is dead, or dies during the request.
const DEAD_MOUNT: [&str; 2] = ["Transport endpoint is not connected", "Software caused connection abort"];
const DEAD_MOUNT_TRIES: u32 = 100;

/// Works like `run`, with bytes for the tool's standard input.
pub fn run_with_input<S: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = S>,
    input: &[u8],
) -> Result<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped());
    finish(command, Some(input))
}

fn finish(mut command: Command, input: Option<&[u8]>) -> Result<String> {
    command.env("LC_ALL", "C").stdout(Stdio::piped()).stderr(Stdio::piped());
    let shown = format!("{command:?}");
    let mut child = command.spawn().with_context(|| format!("cannot start {shown}"))?;
    if let Some(input) = input {
        // Write errors are ignored, because a tool that fails early closes its input and prints the reason.
        let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input));
    }
    let output = child.wait_with_output().with_context(|| format!("cannot wait for {shown}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{shown} failed: {}\n{stdout}{stderr}", output.status);
    }
    Ok(stdout)
}
