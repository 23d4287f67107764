//! Checks of command results, shared by tests.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::borrow::Borrow;
use std::process::Output;

/// Returns the output of a command, which must have succeeded.
#[track_caller]
pub(crate) fn ok(output: impl Borrow<Output>) -> String {
    let output = output.borrow();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr, "", "nothing is said without a reason");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Fails unless the command failed with a one-line error that contains these words.
#[track_caller]
pub(crate) fn refused(output: &Output, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    // For wrong arguments, the error is followed by tips, the usage and a hint to the help.
    let is_usage = stderr.trim_end().lines().last().is_some_and(|line| line.starts_with("For more, see: ubtrfs"));
    assert!(is_usage || stderr.trim_end().lines().count() == 1, "one line: {stderr}");
    assert!(stderr.starts_with("ubtrfs: "), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "'{word}' is missing: {stderr}");
    }
}
