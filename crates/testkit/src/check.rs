//! `btrfs check` as a judge: clean means that it exited with 0 and complained about nothing.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Fails with everything that `btrfs check` said unless it found the filesystem clean.
pub fn btrfs_check(image: &Path) -> Result<()> {
    let (success, text) = btrfs_check_output(image, &["--readonly"])?;
    let complaints: Vec<&str> = text.lines().filter(|line| is_complaint(line)).collect();
    if !success || !complaints.is_empty() {
        bail!("btrfs check of {} is not clean: {}\n{text}", image.display(), complaints.join("; "));
    }
    Ok(())
}

/// Runs `btrfs check` with these arguments: whether it succeeded, and all that it printed.
pub fn btrfs_check_output(image: &Path, args: &[&str]) -> Result<(bool, String)> {
    let output = Command::new("btrfs")
        .arg("check")
        .args(args)
        .arg(image)
        .env("LC_ALL", "C")
        .output()
        .context("cannot start btrfs check")?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok((output.status.success(), text))
}

fn is_complaint(line: &str) -> bool {
    let lower = line.to_lowercase();
    let bad =
        ["error", "warning", "mismatch", "corrupt", "invalid", "missing", "wrong", "unresolved", "orphan", "bad "];
    // The last line of a clean check; and the v1 cache is stale after any writer that does not keep one.
    let harmless = lower.contains("no error found")
        || lower.contains("cache and super generation don't match")
        || lower.contains("space cache will be invalidated");
    !harmless && bad.iter().any(|word| lower.contains(word))
}
