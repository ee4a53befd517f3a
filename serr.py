import torch, rowmax
u=2.0**-24
for d in (16,32,64,128,256,512):
    for be in ("triton","torch"):
        torch.manual_seed(0)
        q=torch.randn(1,8192,4,d,device="cuda"); k=torch.randn(1,1,4,d,device="cuda")
        _,lse=rowmax.attention(q,k,k,scale=1.0,return_lse=True,backend=be)
        s=torch.einsum("bnhd,bmhd->bhn",q.double(),k.double())
        e=lse.double()-s; big=s.abs()>s.abs().mean()
        size=torch.einsum("bnhd,bmhd->bhn",q.double()**2,k.double()**2).sqrt()
        r=(e*s.sign()/s.abs())[big]/u; z=(e/size)/u
        print(be,d,f"signed err/(u|s|): mean {r.mean():.1f} min {r.min():.1f} max {r.max():.1f}; err/(u sqrt(sum q2k2)): rms {z.pow(2).mean().sqrt():.1f} max {z.abs().max():.1f}",flush=True)
