//! Runs system tools. A failed tool becomes an error that contains the tool's output.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Runs a tool. Returns the tool's standard output, or an error with the tool's status and all of its output. A tool that
/// was disturbed by another test ([`untroubled`]) is run again.
pub fn run<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Result<String> {
    let args: Vec<S> = args.into_iter().collect();
    untroubled(
        || {
            let mut command = Command::new(program);
            command.args(&args).stdin(Stdio::null());
            finish(command, None)
        },
        |done| done.as_ref().err().map(ToString::to_string).unwrap_or_default(),
    )
}

/// Runs a tool again as long as its output, which is the result's text, says that another test disturbed it. The tool
/// has changed nothing then.
///
/// - Before they begin, mkfs.btrfs, btrfstune and `btrfs check` look at every mount and its loop device. They give up if
///   the server of one is dead, or if another test removes one meanwhile.
/// - A process that another test has just forked has the open files of this process until it executes its program. A
///   process that makes a mount namespace has all mounts for a moment. So a mount or a device can be busy for a moment.
pub(crate) fn untroubled<T>(run: impl Fn() -> T, text: impl Fn(&T) -> String) -> T {
    for _ in 0..TROUBLED_TRIES {
        let done = run();
        let text = text(&done);
        if !TROUBLE.iter().any(|errors| errors.iter().all(|part| text.contains(part))) {
            return done;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    run()
}

/// Messages of disturbed tools. A message has both texts of its row.
const TROUBLE: [[&str; 2]; 6] = [
    ["mount status", "Transport endpoint is not connected"],
    ["mount status", "Software caused connection abort"],
    ["mount status", "No such device"],
    ["umount: ", "target is busy"],
    ["cannot unregister device", "Device or resource busy"],
    ["cannot open device '/dev/loop", "Device or resource busy"],
];
const TROUBLED_TRIES: u32 = 100;

/// The functions that a library exports, with their versions, such as `btrfs_util_sync@@LIBBTRFSUTIL_1.1`, in order of
/// their names.
pub fn exported_functions(library: &Path) -> Result<Vec<String>> {
    let listed = run("nm", [OsStr::new("-D"), OsStr::new("--defined-only"), library.as_os_str()])?;
    let names = listed.lines().filter_map(|line| line.rsplit_once(" T ")).map(|(_, name)| name.to_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    Ok(names)
}

/// Builds an example beside the program of the test that calls this, and returns its path. `cargo test` has built it
/// already, unless only some targets were chosen.
///
/// It is built with `--workspace`, as the tests are: with `-p`, the crates would be built once more for other features. It
/// is built without the variables that cargo sets for a test: the build script of ring runs again if they change, and then
/// all crates above it are built again.
pub fn build_example(name: &str) -> Result<PathBuf> {
    // The program of a test is in `deps`, beside `examples`.
    let program = std::env::current_exe()?;
    let built = program.parent().and_then(Path::parent).context("the test is in no folder")?;
    let example = built.join("examples").join(name);
    if is_newer_than_its_sources(&example).unwrap_or(false) {
        return Ok(example);
    }
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    cargo.args(["build", "-q", "--locked", "--offline", "--workspace", "--example", name]).current_dir(workspace);
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if VARIABLES_OF_A_TEST.iter().any(|begin| text.starts_with(begin)) {
            cargo.env_remove(&variable);
        }
    }
    cargo.stdin(Stdio::null());
    finish(cargo, None)?;
    Ok(example)
}

/// Whether a program that cargo built is newer than each file of the workspace that it is made of. Cargo lists these in a
/// file beside the program: `PROGRAM: FILE FILE ...`, with a backslash before spaces in names.
fn is_newer_than_its_sources(program: &Path) -> Result<bool> {
    let modified = |path: &Path| std::fs::metadata(path)?.modified();
    let listed = std::fs::read_to_string(program.with_extension("d"))?;
    let (_, sources) = listed.trim_end().split_once(": ").context("the list of sources is not understood")?;
    let built = modified(program)?;
    for source in sources.replace("\\ ", "\0").split(' ') {
        if modified(Path::new(&source.replace('\0', " ")))? >= built {
            return Ok(false);
        }
    }
    Ok(true)
}

/// How the names of the variables begin that cargo sets for one crate.
const VARIABLES_OF_A_TEST: [&str; 5] =
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];

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

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes};
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_program_is_old_if_a_source_is_newer_or_gone() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let make = |name: &str, second: u64| {
            let times = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second));
            File::create(at(name)).unwrap().set_times(times).unwrap();
        };
        make("a.rs", 5);
        make("b c.rs", 6);
        make("program", 7);
        assert!(is_newer_than_its_sources(&at("program")).is_err());
        let list = format!("{0}/program: {0}/a.rs {0}/b\\ c.rs\n", dir.path().display());
        std::fs::write(at("program.d"), list).unwrap();
        assert!(is_newer_than_its_sources(&at("program")).unwrap());
        make("b c.rs", 8);
        assert!(!is_newer_than_its_sources(&at("program")).unwrap());
        std::fs::remove_file(at("b c.rs")).unwrap();
        assert!(is_newer_than_its_sources(&at("program")).is_err());
    }
}
