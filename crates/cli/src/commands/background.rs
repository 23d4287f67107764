//! Continues a command in a second process, so that the first process can end while the work goes on.
//!
//! The second process is this program with the same arguments and the flag `--detached`. It leaves the terminal's
//! session, and writes one byte to its standard output when the work has begun. The first process waits for this byte,
//! so it can report wrong arguments and refusals.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Duration;

use anyhow::{Context, bail};
use ubtrfs_transaction::Job;

/// Starts the second process. Returns when its work has begun or has ended.
pub(crate) fn start() -> anyhow::Result<ExitCode> {
    Ok(match start_with(detached(std::env::args_os().skip(1)))? {
        BackgroundStart::Begun(_) => ExitCode::SUCCESS,
        BackgroundStart::Ended(_, status) => ExitCode::from(status),
    })
}

/// The result of [`start_with`].
pub(crate) enum BackgroundStart {
    /// The process with this id goes on.
    Begun(u32),
    /// The process with this id ended with this status before it told that its work had begun. It has printed the reason
    /// of a failure.
    Ended(u32, u8),
}

/// Starts the second process with these arguments, of which one is `--detached`. Returns when its work has begun or has
/// ended.
pub(crate) fn start_with(args: Vec<OsString>) -> anyhow::Result<BackgroundStart> {
    let program = std::env::current_exe().context("cannot find this program to start it in the background")?;
    // The second process must not keep locks or pipes of the caller open.
    ubtrfs_device::keep_files_from_children();
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a process in the background")?;
    let mut byte = [0];
    if child.stdout.take().is_some_and(|mut out| out.read_exact(&mut byte).is_ok()) {
        return Ok(BackgroundStart::Begun(child.id()));
    }
    let status = child.wait().context("the process in the background was not found")?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        // The process has printed the reason of a failure.
        Some(code) => Ok(BackgroundStart::Ended(child.id(), code)),
        None => bail!("the process in the background ended too early ({status})"),
    }
}

/// Replaces `--background` and `--bg` by `--detached`.
fn detached(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_option = true;
    let replaced = args.map(|arg| {
        is_option &= arg != OsStr::new("--");
        match arg.to_str() {
            Some("--background" | "--bg") if is_option => OsString::from("--detached"),
            _ => arg,
        }
    });
    replaced.collect()
}

/// The second process. Errors are printed to the caller's terminal until the begin is reported; later errors go to
/// syslog, and other output is dropped.
#[derive(Debug)]
pub(crate) struct Detached {
    begin: Once,
    /// Messages to syslog name this work.
    work: String,
}

/// The work of this process if it has told the first process that it continues alone.
static ALONE: OnceLock<String> = OnceLock::new();

/// What this process does in the background; `None` if the caller sees its output.
pub(crate) fn work() -> Option<&'static str> {
    ALONE.get().map(String::as_str)
}

impl Detached {
    /// Leaves the terminal's session, so that signals from the terminal, such as Ctrl-C, do not reach this process.
    /// Messages to syslog name `work`.
    pub(crate) fn new(work: String) -> Self {
        let _ = rustix::process::setsid();
        Self { begin: Once::new(), work }
    }

    /// Tells the first process, once, that this process continues alone.
    pub(crate) fn report_begin(&self) {
        self.begin.call_once(|| report_begin(&self.work));
    }

    /// Does work, as [`Detached::run`] does if this process is in the background.
    pub(crate) fn run_if<T>(detached: Option<&Self>, job: &Job, work: impl FnOnce() -> T) -> T {
        match detached {
            Some(detached) => detached.run(job, work),
            None => work(),
        }
    }

    /// Does work, and reports the begin when the job shows progress.
    fn run<T>(&self, job: &Job, work: impl FnOnce() -> T) -> T {
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Acquire) {
                    let progress = job.wait_for_change(Duration::from_millis(100));
                    if progress.total > 0 || !progress.step.is_empty() {
                        return self.report_begin();
                    }
                }
            });
            let result = work();
            is_done.store(true, Ordering::Release);
            result
        })
    }
}

/// Tells the first process that the work has begun. Then closes stdin, stdout and stderr, so that this process does not
/// keep the caller's terminal or pipes open. Failures are ignored: the caller may have been killed.
fn report_begin(work: &str) {
    let _ = ALONE.set(work.to_owned());
    let mut out = std::io::stdout();
    let _ = out.write_all(b"B").and_then(|()| out.flush());
    if let Ok(null) = std::fs::File::options().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
    }
    let _ = std::env::set_current_dir("/");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_option_is_replaced() {
        let args = ["balance", "start", "--bg", "-dusage=5", "--", "--bg"].map(OsString::from);
        let expected = ["balance", "start", "--detached", "-dusage=5", "--", "--bg"].map(OsString::from);
        assert_eq!(detached(args.into_iter()), expected);
    }
}
