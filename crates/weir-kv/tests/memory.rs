//! The contract on the store in memory.
mod common;

#[tokio::test]
async fn keeps_the_contract() {
    common::contract(&weir_kv::MemoryKv::new()).await;
}
