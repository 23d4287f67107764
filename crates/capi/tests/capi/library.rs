//! The library under test, and programs that use it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use ubtrfs_testkit::{capability, run};

use crate::header::crate_dir;

/// A folder below the target folder with the library, which all tests of a process share. It is linked once in a process,
/// because a static is never dropped, and a folder in /tmp would stay.
static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi");
    fs::create_dir_all(&dir).unwrap();
    let script = crate_dir().join("../../scripts/link-library");
    let archive = built("libubtrfs_capi.a");
    // Programs of another process may run with the old one.
    let linked = dir.join(format!("linked-{}", std::process::id()));
    let args = [OsStr::new("capi"), archive.as_os_str(), linked.as_os_str()];
    run(script.to_str().unwrap(), args).unwrap();
    fs::rename(linked, dir.join("libubtrfs.so.0")).unwrap();
    match symlink("libubtrfs.so.0", dir.join("libubtrfs.so")) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => made.unwrap(),
    }
    dir
});

/// A file that cargo built together with this test.
pub(crate) fn built(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join(name)
}

/// The folder with the library.
pub(crate) fn library() -> &'static Path {
    &LIBRARY
}

/// How a program is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// gcc, C11, with both sanitizers.
    Sanitized,
    /// gcc, C11, without sanitizers.
    Gcc,
    /// clang, C11.
    Clang,
    /// g++, C++17.
    Cpp,
}

/// Compiles a program with warnings as errors; `None` if this machine lacks the compiler.
pub(crate) fn compile(source: &Path, dir: &Path, compiler: Compiler) -> Option<PathBuf> {
    let (program, standard): (&str, &[&str]) = match compiler {
        Compiler::Sanitized => {
            ("gcc", &["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"])
        }
        Compiler::Gcc => ("gcc", &["-std=c11", "-O2"]),
        Compiler::Clang => ("clang", &["-std=c11", "-O1"]),
        Compiler::Cpp => ("g++", &["-std=c++17", "-x", "c++"]),
    };
    if !capability::program(program) {
        return None;
    }
    let made = dir.join(format!("{}-{compiler:?}", source.file_stem().unwrap().to_str().unwrap()));
    let mut args: Vec<OsString> = standard.iter().map(OsString::from).collect();
    args.extend(["-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread", "-I"].map(OsString::from));
    args.push(crate_dir().join("include").into());
    args.extend([OsString::from("-o"), made.clone().into(), source.into()]);
    args.extend([OsString::from("-x"), "none".into(), "-L".into(), library().into(), "-lubtrfs".into()]);
    run(program, args).unwrap();
    Some(made)
}

/// Runs a program, at most for `seconds`.
pub(crate) fn execute(program: &Path, args: &[&OsStr], seconds: u32) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", &seconds.to_string()]).arg(program).args(args);
    // Cargo sets the variable for tests.
    command.env("LD_LIBRARY_PATH", library());
    // A size that memory does not have is an error of the library, not of the sanitizer.
    command.env("ASAN_OPTIONS", "allocator_may_return_null=1");
    command.output().unwrap()
}

/// Runs a program that must succeed without a word on its standard error, and returns its output.
pub(crate) fn output_of(program: &Path, args: &[&OsStr]) -> String {
    let output = execute(program, args, 300);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{program:?} {args:?}: {}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}
