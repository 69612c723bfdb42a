//! Layout of a file that is being born.
use weir_proto::map::{ClusterMap, Layout, Scheme};
use weir_proto::{Error, Result};

/// The layout that the settings ask for: over all groups of the scheme, beginning at one that `seed` chooses.
/// Pools are taken in the order of their names.
pub fn layout_for_new_file(map: &ClusterMap, seed: u32) -> Result<Layout> {
    layout_in(map, None, None, seed)
}

/// The same for a scheme and a pool that somebody chose.
pub fn layout_in(map: &ClusterMap, scheme: Option<Scheme>, pool: Option<&str>, seed: u32) -> Result<Layout> {
    let scheme = scheme.unwrap_or(map.settings.scheme);
    let mut pools: Vec<&str> = map.groups.iter().map(|g| g.pool.as_str()).collect();
    pools.retain(|p| pool.is_none_or(|pool| *p == pool));
    pools.sort_unstable();
    pools.dedup();
    let (first_pg, pg_count) =
        pools.iter().find_map(|pool| map.groups_of(pool, scheme)).ok_or_else(|| {
            Error::unavailable(format!(
                "no placement group of scheme {scheme} yet: it needs {} targets in one pool, {} have joined",
                scheme.width(),
                map.targets.len()
            ))
        })?;
    Ok(Layout { scheme, cell_shift: map.settings.cell_shift, first_pg, pg_count, seed })
}
