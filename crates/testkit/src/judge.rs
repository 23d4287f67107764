//! Verifies an image that ubtrfs wrote, with btrfs-progs, Linux's mount and scrub, and the expected content.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::{Compare, LoopMount, TreeEntry, btrfs_check, compare_entries, walk_path};

/// Checks an image with Linux, and compares the image's trees with the expected content. The error contains all
/// messages.
pub fn judge(image: &Path, mount_options: &str, expected: &[(&[TreeEntry], Compare)]) -> Result<()> {
    btrfs_check(image)?;
    judge_mount(LoopMount::new(image, mount_options)?, expected)
}

/// Verifies what Linux reads from a mount, and scrubs it.
pub(crate) fn judge_mount(mount: LoopMount, expected: &[(&[TreeEntry], Compare)]) -> Result<()> {
    let found =
        walk_path(mount.path()).with_context(|| format!("Linux cannot read it all:\n{}", mount.kernel_log()))?;
    for (entries, what) in expected {
        compare_entries(entries, &found, *what).context("expected (first) and what Linux reads (second) differ")?;
    }
    mount.scrub()?;
    let complaints = mount.kernel_complaints();
    ensure!(complaints.is_empty(), "Linux complains:\n{}", complaints.join("\n"));
    mount.close()
}
