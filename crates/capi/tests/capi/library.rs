//! The library under test, and programs that use it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use tempfile::TempDir;
use ubtrfs_testkit::{capability, run};

use crate::header::crate_dir;

/// A folder with the library and the header, as an installation has them.
pub(crate) struct Library {
    dir: TempDir,
}

/// The library that all tests of a process share.
static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let dir = TempDir::with_prefix("ubtrfs-capi-").unwrap();
    let script = crate_dir().join("../../scripts/link-library");
    let library = dir.path().join("libubtrfs.so.0");
    let archive = built("libubtrfs_capi.a");
    let args = [OsStr::new("capi"), archive.as_os_str(), library.as_os_str()];
    run(script.to_str().unwrap(), args).unwrap();
    std::os::unix::fs::symlink("libubtrfs.so.0", dir.path().join("libubtrfs.so")).unwrap();
    Library { dir }
});

/// A file that cargo built together with this test.
pub(crate) fn built(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join(name)
}

/// The folder with the library.
pub(crate) fn library() -> &'static Path {
    LIBRARY.dir.path()
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

/// The functions that a library exports, with their versions, such as `ubtrfs_sync@@LIBUBTRFS_0`.
pub(crate) fn functions(library: &Path) -> Vec<String> {
    let listed = run("nm", [OsStr::new("-D"), OsStr::new("--defined-only"), library.as_os_str()]).unwrap();
    let names = listed.lines().filter_map(|line| line.rsplit_once(" T ")).map(|(_, name)| name.to_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}
